"""Time and memory of the passes over the steps of full-size models, beside torchtitan's own."""
