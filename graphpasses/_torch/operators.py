"""The registry of operators: which exist, which have a kernel, and fake kernels for those that lack one."""

from collections.abc import Callable
from typing import Any

import torch

# The registration behind `torch.library.register_fake`, which refuses an op whose C++ library names another
# Python module (`set_python_module`) as the home of its fake kernels. torch 2.13.0.
from torch._library import simple_registry

__all__ = ["argument_defaults", "has_kernel", "operator_names", "register_fake_kernel"]


def operator_names(namespace: str) -> list[str]:
    """Returns the sorted full names, e.g. ``"aten::add.Tensor"``, of the operators of one library."""
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::"))


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Returns whether an operator has a kernel for a dispatch key, e.g. ``"CPU"``, ``"Meta"``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key)


def argument_defaults(operator: torch._ops.OpOverload) -> dict[str, Any]:
    """Returns the names of an operator's arguments, in order, with their defaults (None where there is none)."""
    return {argument.name: argument.default_value for argument in operator._schema.arguments}


def register_fake_kernel(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Gives an operator that has no fake kernel one, for as long as ``library`` lives.

    Args:
        library: a fragment of the operator's library.
        name: full name, e.g. ``"fbgemm::permute_sequence_embeddings"``.
        kernel: what makes the outputs, as for ``torch.library.register_fake``.

    Raises:
        RuntimeError: the operator has one.
    """
    holder = simple_registry.singleton.find(name).fake_impl
    holder.register(kernel, kernel.__module__, lib=library, allow_override=False)
