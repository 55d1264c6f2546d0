"""Hugging Face models, unmodified: eager FSDP2 against the graph."""
