"""Proof that two runs computed the same bits: hash, record, compare."""

from graphpasses.lazy_names import attach_stub

# The public names are in __init__.pyi. Comparing two run files needs no torch.
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
