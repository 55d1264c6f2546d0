"""The passes, one per file, and the pipelines made of them."""

from graphpasses.lazy_names import attach_stub

# The public names are in __init__.pyi.
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
