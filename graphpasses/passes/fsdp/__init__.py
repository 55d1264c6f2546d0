"""Passes that give FSDP steps eager FSDP2's collectives and bits."""
