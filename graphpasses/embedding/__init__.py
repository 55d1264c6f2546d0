"""TorchRec and FBGEMM in a captured training step, and models that share tables; loads neither before it is used."""

from graphpasses.lazy_names import attach_stub

# The public names are in __init__.pyi.
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
