"""Compiler passes for distributed training graphs that keep eager's bits, and the proof that they do.

Capture a training step (:func:`capture_train_step`), rewrite it (:func:`default_pipeline`), run it like a
function, and compare the run with eager's (:class:`ParityRecorder`, ``graphpasses compare``).
"""

from graphpasses.lazy_names import attach_stub

__version__ = "0.1.0"

# The public names are in __init__.pyi.
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
