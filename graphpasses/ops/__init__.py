"""Our own operators: schema, reference, fake kernel and backward of each in one file."""
