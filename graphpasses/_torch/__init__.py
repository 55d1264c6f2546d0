"""The only package that uses private torch APIs; README.md lists each, why, and for which versions."""

from graphpasses._torch.tested_versions import warn_of_untested_torch

warn_of_untested_torch()
