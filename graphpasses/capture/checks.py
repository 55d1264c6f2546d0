"""Checks of the user's code: decisions that raise unless a tensor is true, or false, which a graph asserts."""

from __future__ import annotations

import dis
import inspect
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from graphpasses._torch.fake_mode import fake_call, fake_mode_of, outside_tracing
from graphpasses._torch.fx_graphs import ANOTHER_WAY
from graphpasses._torch.operator_facts import autograd_node
from graphpasses.capture.traced_lines import frames_to_user, is_traced_code
from graphpasses.graph.nodes import argument

aten = torch.ops.aten

_MAX_LENGTH = 254  # of the message of an assertion


def checked_truth() -> bool | None:
    """Returns what a value must be that Python code asks for its truth now, as it raises otherwise; None of others.

    Asked is the innermost frame that is about to jump: its code says what follows.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if goes_on := _truths_that_go_on(frame):
            return goes_on.pop() if len(goes_on) == 1 else None
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_name == "__bool__" and package != "torch":
            return None  # what asks the user's class for its truth does not ask for the value's
        frame = frame.f_back
    return None


def _truths_that_go_on(frame: FrameType) -> set[bool]:
    """Returns for which truths of a value code does not raise; none where it does not jump by one.

    It jumps by the value, by ``bool(value)``, or by a call of what returns that.
    """
    caller: FrameType | None = frame
    called = "bool" if "bool" not in frame.f_globals else ""
    while caller is not None:
        instructions = [each for each in dis.get_instructions(caller.f_code) if each.opname not in _BETWEEN]
        at = sum(each.offset <= caller.f_lasti for each in instructions) - 1  # caches behind it count as its own
        if instructions[at].opname == "PRECALL":  # of Python 3.11, which calls some types here
            at += 1
        load = _load_of_called(instructions, instructions[at])
        if load and load.argval == called and (caller is not frame or load.opname in ("LOAD_GLOBAL", "LOAD_NAME")):
            at += 1
        if instructions[at].opname == "TO_BOOL":  # before a jump, from Python 3.13 on
            at += 1
        if _is_jump(instructions[at]):
            return _goes_on(instructions, at)
        if instructions[at].opname != "RETURN_VALUE":
            return set()
        called, caller = caller.f_code.co_name, caller.f_back
    return set()


_BETWEEN = ("CACHE", "NOT_TAKEN")


def _is_jump(instruction: dis.Instruction) -> bool:
    return bool({"TRUE", "FALSE"}.intersection(instruction.opname.split("_")))


def _load_of_called(instructions: list[dis.Instruction], call: dis.Instruction) -> dis.Instruction | None:
    """Returns what loads the function that an instruction calls, where the call begins; None if it calls none."""

    def begin(each: dis.Instruction) -> tuple[int | None, int | None] | None:
        return each.positions and (each.positions.lineno, each.positions.col_offset)

    loads = [each for each in instructions if begin(each) == begin(call) and each.opname.startswith("LOAD_")]
    return loads[-1] if loads and call.opname.startswith("CALL") else None


def _goes_on(instructions: list[dis.Instruction], at: int) -> set[bool]:
    jump = instructions[at]
    target = next(index for index, each in enumerate(instructions) if each.offset == jump.argval)
    jumps_if = "TRUE" in jump.opname
    found = {jumps_if} if not _raises(instructions[target:]) else set()
    return found | ({not jumps_if} if not _raises(instructions[at + 1 :]) else set())


def _raises(instructions: list[dis.Instruction]) -> bool:
    """Whether instructions raise before they return, decide, or set what is seen elsewhere."""
    for each in instructions:
        if each.opname == "RAISE_VARARGS":
            return True
        if any(word in each.opname for word in _DOES_MORE):
            return False
    return False


_DOES_MORE = ("JUMP", "RETURN", "YIELD", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL")


def reads_bool(node: fx.Node) -> bool:
    """Whether a node reads the value of a tensor that is a bool."""
    return node.target is aten._local_scalar_dense.default and argument(node).meta["val"].dtype is torch.bool


def assert_truth(item: fx.Node, truth: bool, where: str) -> None:
    """Adds to a traced graph that the bool of which ``item`` reads the value is as code at a line checks it."""
    condition = argument(item)
    if not truth:
        condition = _call(item, aten.logical_not.default, condition)
    _assert(item, condition, f"loss_fn raises an error at {where} with these values: run it eagerly to see which")


# What asks for a number of elements only to spare work: its result is empty, too.
_EMPTY_OF_EMPTY = frozenset({"CummaxBackward0", "CumminBackward0", "CumsumBackward0", "LogcumsumexpBackward0"})
_DROPOUTS: Any = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_CODE_OF_DROPOUTS = frozenset(dropout.__code__ for dropout in _DROPOUTS)


def spares_work() -> bool:
    """Whether what asks now for a number of elements returns as many: if there are none, all ways are the same."""
    *torchs, last = frames_to_user()
    if not is_traced_code(last):
        return autograd_node() in _EMPTY_OF_EMPTY
    return any(frame.f_code in _CODE_OF_DROPOUTS for frame in torchs)


def user_asks() -> bool:
    """Whether the user's code, or a library's that does not trace, asks for a truth now: no operator of torch."""
    *_, asks, last = frames_to_user()
    return is_traced_code(last) and asks.f_code is torch.SymBool.__bool__.__code__


def assert_not_size(node: fx.Node, dim: int, size: int, asking: str, where: str) -> None:
    """Adds to a traced graph that a dim has not a size, 0 or 1, at which ``asking`` would go another way in eager."""
    number = node.graph.call_function(aten.sym_size.int, (node, dim))
    number.meta = _origin(node) | {"val": node.meta["val"].shape[dim]}
    number = _call(node, aten.scalar_tensor.default, number, dtype=torch.int64)
    rows = "one row" if size else "no rows"
    text = f"{asking} ({where}) {ANOTHER_WAY} {rows}, as were selected now: run this batch eagerly"
    _assert(node, _call(node, aten.ne.Scalar, number, size), text)


def _call(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    call = like.graph.call_function(target, args, kwargs)
    values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
    # The number of rows is no number yet; any has the shape and the dtype.
    values = [0 if isinstance(each, torch.SymInt) else each for each in values]
    mode = fake_mode_of([*values, like.meta["val"]])
    assert mode is not None
    with outside_tracing():
        call.meta = _origin(like) | {"val": fake_call(mode, target, tuple(values), kwargs)}
    return call


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key != "unbacked_bindings"}


def _assert(like: fx.Node, condition: fx.Node, text: str) -> None:
    asserted = like.graph.call_function(aten._assert_async.msg, (condition, text[-_MAX_LENGTH:]))
    asserted.meta = _origin(like) | {"val": None}
