"""Which line of the code that is traced runs, or raised, and which module: what traces is left out."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.fx.traceback import annotate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import graphpasses
from graphpasses._torch.operator_facts import autograd_node
from graphpasses._torch.recorded_operator import MODULE_FQN

_TRACING = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sympy, graphpasses))
_PYTHON = f"{Path(inspect.__file__).parent}/"  # and of its library what is no package's


def user_line() -> str:
    """Returns the innermost line of code that runs now and is no library's that traces; or what of backward does."""
    *_, frame = frames_to_user()
    if not is_traced_code(frame):
        return f"{autograd_node()} of backward"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def frames_to_user() -> Iterator[FrameType]:
    """Yields the frames from the innermost to that of the user's code, or to that which runs backward, inclusive."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        if is_traced_code(frame) or (frame.f_code.co_name == "_engine_run_backward" and autograd_node()):
            return
        frame = frame.f_back


def is_traced_code(frame: FrameType) -> bool:
    """Whether a frame runs code that is no library's that traces: the user's, or what that calls."""
    return _is_traced(frame.f_code.co_filename)


def _is_traced(file: str) -> bool:
    return not file.startswith(_TRACING) and not (file.startswith(_PYTHON) and "-packages" not in file)


def line_of(error: BaseException) -> str:
    """Returns the innermost line that an error passed and that is no library's that traces."""
    lines = traceback.extract_tb(error.__traceback__)
    own = [line for line in lines if _is_traced(line.filename)]
    return "{0.filename}:{0.lineno} in {0.name}".format(own[-1]) if own else "an unknown line"


@contextmanager
def module_names_traced(model: nn.Module) -> Iterator[None]:
    """Notes on each node that the block traces which module of a model computes it."""
    names = {module: fqn for fqn, module in reversed([*model.named_modules()])}
    entered: list[tuple[nn.Module, AbstractContextManager[None]]] = []

    def enter(module: nn.Module, _: object) -> None:
        if module in names:
            entered.append((module, annotate({MODULE_FQN: names[module]})))
            entered[-1][1].__enter__()

    def leave(module: nn.Module, *_: object) -> None:
        if entered and entered[-1][0] is module:  # not where another hook raised before it was entered
            entered.pop()[1].__exit__(None, None, None)

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True):
        yield
