"""Step time of eager FSDP2 and of captured steps, and the time that the pipeline itself takes."""
