"""Eager FSDP2 against the captured and rewritten step, bit for bit."""
