"""The registry of operators: which exist, which have a kernel, and kernels for tracing where one lacks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch._library import simple_registry

# A kernel that reads the arguments of a call by their names in the operator's schema.
Rule = Callable[[SimpleNamespace], Any]


def operator_names(namespace: str) -> list[str]:
    """Returns the sorted full names, e.g. ``"aten::add.Tensor"``, of the operators of one library."""
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::"))


def has_kernel(name: str, *dispatch_keys: str) -> bool:
    """Returns whether an operator has a kernel of its own for one of ``dispatch_keys``, e.g. ``"CPU"``."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in dispatch_keys)


class TracingKernels:
    """Kernels that tracers run for operators of a library that have none; eager calls do not see them."""

    def __init__(self, namespace: str) -> None:
        self._library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._undo: list[Callable[[], object]] = []

    def add_fake(self, name: str, rule: Rule) -> None:
        """Adds a fake kernel to an operator that has none; ``rule`` is as for ``torch.library.register_fake``."""
        holder = simple_registry.singleton.find(name).fake_impl
        source = f"{rule.__module__}.{rule.__qualname__}"
        handle = holder.register(_kernel(name, rule), source, lib=self._library, allow_override=False)
        self._undo.append(handle.destroy)

    def add_autograd(self, name: str, rule: Rule) -> None:
        """Replaces an operator's autograd on CPU for tracers; ``rule`` may call it again :func:`below_autograd`."""
        overload, key = _overload(name), torch.DispatchKey.AutogradCPU

        def undo() -> None:
            del overload.py_kernels[key]
            overload._dispatch_cache.clear()

        # Python kernels of an overload run under the Python dispatcher only, which tracers turn on.
        overload.py_impl(key)(_kernel(name, rule))
        self._undo.append(undo)

    def remove(self) -> None:
        """Removes all of them."""
        while self._undo:
            self._undo.pop()()
        self._library._destroy()  # type: ignore[no-untyped-call]


def below_autograd() -> AbstractContextManager[None]:
    """Returns a context in which operators skip their autograd kernels."""
    return torch._C._AutoDispatchBelowAutograd()


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, _, packet = name.partition("::")
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), packet).default
    return overload


def _kernel(name: str, rule: Rule) -> Callable[..., Any]:
    arguments = {argument.name: argument.default_value for argument in _overload(name)._schema.arguments}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Trailing arguments that equal their default are not passed.
        return rule(SimpleNamespace(**arguments | dict(zip(arguments, args, strict=False)) | kwargs))

    return kernel
