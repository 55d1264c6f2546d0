"""What a step holds constant: the Python values, settings and structure that its graph has built in."""
