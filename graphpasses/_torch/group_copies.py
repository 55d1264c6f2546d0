"""Copies of modules that hold process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import _distributed_c10d as _c10d

__all__ = ["groups_are_kept"]


@contextmanager
def groups_are_kept() -> Iterator[None]:
    """Lets ``copy.deepcopy`` keep process groups as they are in a block.

    TorchRec's copies do so for the classes of NCCL, which builds of torch without CUDA lack, and of gloo; but what a
    module holds is of the class above them. Tested: 2.13.
    """
    c10d: Any = _c10d
    is_named = hasattr(c10d, "ProcessGroupNCCL")
    if not is_named:
        c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})
    group_class = c10d.ProcessGroup
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
            del c10d.ProcessGroupNCCL
