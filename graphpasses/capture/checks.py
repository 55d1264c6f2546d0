"""Checks of the user's code: decisions that raise unless a tensor is true, or false, which a graph asserts."""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Mapping
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from graphpasses._torch.conditions import as_text
from graphpasses._torch.fake_calls import fake_call
from graphpasses._torch.fake_mode import outside_tracing
from graphpasses._torch.symbols import size_at
from graphpasses.capture.traced_lines import frames_to_user, is_traced_code
from graphpasses.graph.nodes import argument
from graphpasses.ops.check_sizes import CHECK_SIZES

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
        if {"TRUE", "FALSE"}.intersection(instructions[at].opname.split("_")):  # a jump by it
            return _goes_on(instructions, at)
        if instructions[at].opname != "RETURN_VALUE":
            return set()
        called, caller = caller.f_code.co_name, caller.f_back
    return set()


_BETWEEN = ("CACHE", "NOT_TAKEN")


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
    graph, condition = item.graph, argument(item)
    if not truth:
        value = condition.meta["val"]
        condition = graph.call_function(aten.logical_not.default, (condition,))
        with outside_tracing():
            condition.meta = _origin(item) | {"val": fake_call(value.fake_mode, condition.target, (value,), {})}
    text = f"loss_fn raises an error at {where} with these values: run it eagerly to see which"
    asserted = graph.call_function(aten._assert_async.msg, (condition, text[-_MAX_LENGTH:]))
    asserted.meta = _origin(item) | {"val": None}


def assert_of_sizes(condition: sympy.Basic, places: Mapping[Any, tuple[fx.Node, Any]], message: str) -> bool:
    """Adds to a traced graph that a condition is true of sizes, and of numbers, that nodes bring; whether it can."""
    text, symbols = as_text(condition) or ("", ())
    found = [_number_at(*places[symbol]) for symbol in symbols]
    numbers = [number for number in found if number is not None]
    if not symbols or len(numbers) < len(found):
        return False
    asserted = numbers[0].graph.call_function(CHECK_SIZES, (numbers, text, message))
    asserted.meta = _origin(numbers[0]) | {"val": None}
    return True


def _number_at(node: fx.Node, path: Any) -> fx.Node | None:
    """Returns the node of the number that stands at a place of a node's value; None if it is no size."""
    if not path:
        return node
    if (place := size_at(path)) is None:
        return None
    indices, dim = place
    for index in indices:  # the tracer took parts as soon as there were any
        node = next(user for user in node.users if user.target is operator.getitem and user.args[1] == index)
    size = node.graph.call_function(aten.sym_size.int, (node, dim))
    size.meta = _origin(node) | {"val": node.meta["val"].shape[dim]}
    return size


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key != "unbacked_bindings"}


def user_asks() -> bool:
    """Whether the user's code, or a library's that does not trace, asks for a truth now: no operator of torch."""
    *_, asks, last = frames_to_user()
    return is_traced_code(last) and asks.f_code is torch.SymBool.__bool__.__code__


_COMPARISONS = {getattr(aten, name).Scalar: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}


def certain_value(node: fx.Node) -> bool | None:
    """Returns what a node that reads a number from a tensor computes, if it is a bool that nothing changes, or None.

    Layers that are dropped at random ask ``torch.rand([]) < self.layerdrop``, also where none is ever dropped: no
    draw changes the answer.
    """
    compared = node.args[0]
    if not isinstance(compared, fx.Node) or compared.target not in _COMPARISONS:
        return None
    drawn, bound = compared.args
    if getattr(drawn, "target", None) is not aten.rand.default or not isinstance(bound, (int, float)):
        return None
    # Between 0 and 1, which low precision may round to, a comparison changes once at most.
    compare = _COMPARISONS[compared.target]
    return bool(compare(0, bound)) if compare(0, bound) == compare(1, bound) else None
