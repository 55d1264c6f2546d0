"""Which functions run in a block, and the names that their code has for what it reads."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

from graphpasses._torch.operator_calls import dispatch_wrapped
from graphpasses._torch.pytree import tree_leaves


@contextmanager
def calls_watched(on_call: Callable[[FrameType], None]) -> Iterator[None]:
    """Gives ``on_call`` each frame that begins in the block, in this thread, above torch's dispatcher."""
    before: Any = sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        on_call(frame)
        if before is None:
            return None
        local = before(frame, event, argument)
        if sys.gettrace() is not trace:  # coverage installs itself again at each call
            sys.settrace(trace)
        return local

    def paused(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if sys.gettrace() is not trace:
                return call(*args, **kwargs)
            sys.settrace(before)
            try:
                return call(*args, **kwargs)
            finally:
                sys.settrace(trace)

        return run

    with dispatch_wrapped(paused):
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


class CodeNames(NamedTuple):
    """The names that the code of a function has, without those of the functions in it."""

    globals: frozenset[str]  # that it reads or sets
    # That it may read or set of anything: by name, or by a text that ``getattr`` may be given; and the function's.
    attributes: frozenset[str]
    optional: frozenset[str]  # of these the texts, where code asks by name and does without
    imports: frozenset[str]  # the modules that it imports


_STORES = frozenset({"setdefault", "update", "__setitem__"})


@functools.lru_cache(maxsize=10_000)
def stored_names(code: CodeType) -> frozenset[str]:
    """Returns the names of what code gives items: ``cache`` for ``self.cache[key] = x``."""
    if dis.opmap["STORE_SUBSCR"] not in code.co_code[::2] and _STORES.isdisjoint(code.co_names):
        return frozenset()
    last: dict[Any, str] = {}  # by where an expression begins
    stores: set[Any] = set()
    for instruction in dis.get_instructions(code):
        where, name = instruction.positions and instruction.positions[::2], instruction.argval
        if instruction.opname == "STORE_SUBSCR" or name in _STORES:
            stores.add(where)
        elif instruction.opname.startswith("LOAD_") and isinstance(name, str):
            last[where] = name
    return frozenset(last[where] for where in stores if where in last)


@functools.lru_cache(maxsize=10_000)
def names_of(code: CodeType) -> CodeNames:
    globals_: set[str] = set()
    imports: set[str] = set()
    attributes = {code.co_name}
    for instruction in dis.get_instructions(code):
        opcode, name = instruction.opname, instruction.argval
        if opcode == "IMPORT_NAME":
            imports.add(name)
        elif opcode.endswith(("_GLOBAL", "_NAME")):
            globals_.add(name)
        elif opcode.endswith(("_ATTR", "_METHOD")) and (name[:2] != "__" or name == "__dict__"):
            attributes.add(name)
    if globals_ & {"vars", "dir"}:
        attributes.add("__dict__")
    found = (each.split(".") for each in tree_leaves(code.co_consts) if isinstance(each, str))
    texts = frozenset(part for parts in found for part in parts if part.isidentifier())
    optional = texts if globals_ & {"getattr", "hasattr", "setattr"} else frozenset[str]()
    return CodeNames(frozenset(globals_), texts | attributes, optional, frozenset(imports))
