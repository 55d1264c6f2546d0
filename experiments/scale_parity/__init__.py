"""Eager FSDP2 against its graph on clusters of 64 to 256 ranks, played by one machine."""
