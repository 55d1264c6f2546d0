"""What passes with each version of torch: the table of docs/versions.md."""
