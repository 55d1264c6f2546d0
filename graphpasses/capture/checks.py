"""Checks of the user's code: decisions that raise unless a tensor is true, or false, which a graph asserts."""

from __future__ import annotations

import dis
import inspect
from types import CodeType

import torch
from torch import fx

from graphpasses._torch.fake_mode import fake_call, outside_tracing
from graphpasses.graph.nodes import argument

aten = torch.ops.aten

_MAX_LENGTH = 254  # of the message of an assertion


def checked_truth() -> bool | None:
    """Returns what a value must be that Python code asks for its truth now, as it raises otherwise; None of others.

    Asked is the innermost frame that is about to jump: its code says what follows.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if goes_on := _truths_that_go_on(frame.f_code, frame.f_lasti):
            return goes_on.pop() if len(goes_on) == 1 else None
        frame = frame.f_back
    return None


def _truths_that_go_on(code: CodeType, offset: int) -> set[bool]:
    """Returns for which truths of a value code does not raise; none where it does not jump by one."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "NOT_TAKEN")]
    index = next((index for index, each in enumerate(instructions) if each.offset == offset), None)
    if index is not None and instructions[index].opname == "TO_BOOL":  # Python 3.13 has it before a jump
        index += 1
    if index is None or not {"TRUE", "FALSE"}.intersection(instructions[index].opname.split("_")):
        return set()
    jump = instructions[index]
    target = next(index for index, each in enumerate(instructions) if each.offset == jump.argval)
    jumps_if = "TRUE" in jump.opname
    found = {jumps_if} if not _raises(instructions[target:]) else set()
    return found | ({not jumps_if} if not _raises(instructions[index + 1 :]) else set())


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
    graph, condition = item.graph, argument(item)
    origin = {key: value for key, value in item.meta.items() if key != "unbacked_bindings"}
    if not truth:
        value = condition.meta["val"]
        condition = graph.call_function(aten.logical_not.default, (condition,))
        with outside_tracing():
            condition.meta = {**origin, "val": fake_call(value.fake_mode, condition.target, (value,), {})}
    text = f"loss_fn raises an error at {where} with these values: run it eagerly to see which"
    asserted = graph.call_function(aten._assert_async.msg, (condition, text[-_MAX_LENGTH:]))
    asserted.meta = {**origin, "val": None}
