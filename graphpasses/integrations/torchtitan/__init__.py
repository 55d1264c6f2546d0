"""torchtitan: the pass pipeline for its graph_trainer."""
