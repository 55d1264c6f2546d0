"""Every causal language model that transformers registers: eager FSDP2 against the graph."""
