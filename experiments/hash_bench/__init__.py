"""Speed of the tensor hash, beside SHA-256 of the same bytes."""
