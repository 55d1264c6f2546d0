"""Copies of modules that hold process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import _distributed_c10d

__all__ = ["groups_are_kept"]


@contextmanager
def groups_are_kept() -> Iterator[None]:
    """Lets ``copy.deepcopy`` keep process groups as they are in a block.

    TorchRec's copies do so for the classes of NCCL and gloo, the first of which builds of torch without CUDA lack; but
    what a module holds is of the class that they wrap. Tested: 2.13.
    """
    is_named = hasattr(_distributed_c10d, "ProcessGroupNCCL")
    if not is_named:
        _distributed_c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})
    group_class: Any = _distributed_c10d.ProcessGroup
    own = vars(group_class).get("__deepcopy__")
    group_class.__deepcopy__ = lambda group, memo: group
    try:
        yield
    finally:
        if own is None:
            del group_class.__deepcopy__
        else:
            group_class.__deepcopy__ = own
        if not is_named:
            del _distributed_c10d.ProcessGroupNCCL
