"""What a module of torch answers to those who ask for one of its names, by who asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

# A module's class may be replaced by a subclass, whose properties come before the module's own names: for
# ``module.name`` and ``from module import name``, not for the module's own code. Tested: 2.13.
from torch import _guards, _subclasses, nn
from torch._subclasses import fake_tensor

# From torch 2.15 on DTensor pads and narrows by nothing where it is traced, and asks this module whether it is.
from torch.distributed.tensor import _collective_utils
from torch.fx import _symbolic_trace


class NoFakeTensor:
    """Replaces ``FakeTensor`` where code shall see none: no object is one."""


def _no(*args: object, **kwargs: object) -> bool:
    return False


def _none(*args: object, **kwargs: object) -> None:
    return None


_IN_EAGER: tuple[tuple[ModuleType, Mapping[str, Any]], ...] = (
    (torch.compiler, {"_is_non_strict_tracing": _no}),
    (_symbolic_trace, {"is_fx_tracing": _no, "is_fx_symbolic_tracing": _no}),
    (_subclasses, {"FakeTensor": NoFakeTensor}),
    (fake_tensor, {"FakeTensor": NoFakeTensor, "is_fake": _no}),
    (_guards, {"detect_fake_mode": _none}),
)


@contextmanager
def answers_as_in_eager() -> Iterator[None]:
    """Lets torch say, in the block, that nothing is traced or compiled and no tensor is a fake one.

    So a model that asks takes the path that it takes in eager; code that imported the class ``FakeTensor`` before
    still sees what the tensors are. torch's own code, which traces, is told the truth, but for DTensor's paddings,
    which eager leaves out; so is a module that is imported in the block, which keeps it.

    Example:
        >>> def name():
        ...     from torch._subclasses import FakeTensor
        ...     return FakeTensor.__name__
        >>> with answers_as_in_eager():
        ...     name()
        'NoFakeTensor'
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.compiler, _is_compiling_flag=False, _is_exporting_flag=False))
        if hasattr(_collective_utils, "get_proxy_mode"):
            stack.enter_context(mock.patch.object(_collective_utils, "get_proxy_mode", _none))
        for module, answers in _IN_EAGER:
            names = {name: _answer(name, answer) for name, answer in answers.items()}
            before = module.__class__
            stack.callback(setattr, module, "__class__", before)
            module.__class__ = type(before.__name__, (before,), names)
        yield


def mark_parameters(model: nn.Module) -> None:
    """Lets traced tensors in the place of a model's parameters be parameters to those who ask, as ``setattr``."""
    for parameter in nn.Module.parameters(model):
        parameter._is_param = True  # what `isinstance(x, nn.Parameter)` reads. Tested: 2.13


def _answer(name: str, in_eager: Any) -> property:
    def read(module: ModuleType) -> Any:
        frame = sys._getframe(1)
        is_torch = frame.f_globals.get("__name__", "").partition(".")[0] == "torch"
        return vars(module)[name] if is_torch or frame.f_code.co_name == "<module>" else in_eager

    return property(read)
