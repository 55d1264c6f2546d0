"""What a captured training step is: a graph, what its inputs and outputs are, and what is legal in it."""

from graphpasses.lazy_names import attach_stub

# The public names are in __init__.pyi.
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
