"""torchtitan's eager trainer against its graph_trainer with our pipeline: hashes of every step."""
