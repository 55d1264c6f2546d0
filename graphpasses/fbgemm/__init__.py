"""FBGEMM's calls in a graph, by name and by what they look up; nothing of FBGEMM is imported for them."""
