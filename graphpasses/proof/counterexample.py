"""Run what two graphs compute on random inputs, on the CPU: two values differ only where that shows it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import fx

from graphpasses._torch.fake_mode import outside_tracing
from graphpasses._torch.group_ranks import named_group_ranks
from graphpasses._torch.schemas import schemas
from graphpasses.analysis.effects import is_elementwise_on_lists
from graphpasses.graph.nodes import attribute, collective_group, constant_bits
from graphpasses.proof.core.values import Argument, Values
from graphpasses.proof.difference import called
from graphpasses.proof.real_memory import (
    MAX_ELEMENTS,
    CannotRunError,
    buffer_of,
    in_one_memory,
    laid_out,
    strided,
    view_of,
    would_end_process,
)
from graphpasses.proof.terms import KINDS, Term

MAX_TERMS = 20_000
SEEDS = (0, 1)
_REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
# Other operators may read memory by random numbers, other functions do what they like.
_LIBRARIES = ("aten.", "prims.")
_FUNCTIONS = ("_operator.", "math.", "torch.sym_")
# What memory holds beside what was written: it may be what it was.
_MEMORY = ("written beside", "written in part", "part of memory")
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda each: each.sum(0),
    "avg": lambda each: each.sum(0) / each.shape[0],
    "max": lambda each: each.amax(0),
    "min": lambda each: each.amin(0),
    "product": lambda each: each.prod(0),
}

Kind = Literal["value", "source", "call"]
Request = tuple[Kind, Any, int]
"""A kind, its number or key, and a rank.

This rank is 0. Another has a bit of each group that leads to it; all others of one group have the same inputs.
"""


class _NeededError(Exception):
    """What a request asks for needs what others ask for, which was not made yet."""


@dataclass(frozen=True)
class Trial:
    """What running two values has shown: where they part, or why they cannot be run; neither if they are alike."""

    parts: str = ""
    reason: str = ""


class Runs:
    """Runs terms of graphs, for each seed; what cannot be run and both have (``common``) has random results."""

    def __init__(self, values: Values, graphs: Iterable[fx.Graph], common: Container[int]) -> None:
        nodes = [node for graph in graphs for node in graph.nodes]
        constants = [attribute(node) for node in nodes if node.op == "get_attr"]
        tensors = {constant_bits(each): each for each in constants if isinstance(each, torch.Tensor)}
        functions = {id(node.target): node.target for node in nodes if node.op == "call_function"}
        bits = _bits_of({str(group) for node in nodes if (group := collective_group(node)) is not None})
        self._runs = [_Run(values, tensors, functions, common, bits, seed) for seed in SEEDS]

    def compare(self, kind: Literal["value", "source"], one: int, two: int) -> Trial:
        """Returns what two values are on random inputs, or two sources, as of random states; by their numbers."""
        for run in self._runs:
            try:
                x, y = run((kind, one, 0)), run((kind, two, 0))
            except CannotRunError as error:
                return Trial(reason=str(error))
            if parts := _where_unlike(x, y):
                others = f" and results of {', '.join(run.stood_in)}" if run.stood_in else ""
                return Trial(f"on random inputs{others} of seed {run.seed} {parts}")
        return Trial()


def _bits_of(groups: Iterable[str]) -> dict[str, int]:
    """Returns a bit for each group; those that have more than one rank in common have one."""
    families: list[dict[str, set[int]]] = []
    for name in sorted(groups):
        try:
            family = {name: {*named_group_ranks(name)}}
        except RuntimeError:  # it is gone
            continue
        for other in [*families]:
            if any(len(ranks & family[name]) > 1 for ranks in other.values()):
                family |= other
                families.remove(other)
        families.append(family)
    return {name: 1 << index for index, family in enumerate(families) for name in family}


def _where_unlike(x: Any, y: Any) -> str:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        texts = ["a tensor" if isinstance(each, torch.Tensor) else str(each) for each in (x, y)]
        return "" if "a tensor" not in texts and x == y else " becomes ".join(texts)
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return f"a tensor of {x.dtype} and shape {tuple(x.shape)} becomes one of {y.dtype} and {tuple(y.shape)}"
    with outside_tracing():
        flat = [each.resolve_conj().reshape(-1, 1).contiguous() for each in (x, y)]
        bits = [each.view(torch.uint8).view(each.shape[0], -1) for each in flat]
        unlike = (bits[0] != bits[1]).any(1) & ~(flat[0].isnan() & flat[1].isnan()).view(-1)
        if not unlike.any():
            return ""
        index = int(unlike.nonzero()[0])
        return f"element {index} is {flat[0][index].item()!r} before and {flat[1][index].item()!r} after"


@dataclass(eq=False)
class _Run:
    values: Values
    constants: Mapping[Hashable, torch.Tensor]
    functions: Mapping[int, Callable[..., Any]]
    common: Container[int]
    bits: Mapping[str, int]  # by group, which stands for its other ranks
    seed: int
    stood_in: dict[str, None] = field(default_factory=dict)  # the operators that have random results
    _known: dict[Request, Any] = field(default_factory=dict)
    _num_elements: int = 0

    def __call__(self, request: Request) -> Any:
        """Returns what a request asks for, after all that it needs; terms may be deeper than Python's stack."""
        state = torch.get_rng_state()
        with outside_tracing(), torch.no_grad():
            try:
                return self._run(request)
            finally:
                torch.set_rng_state(state)

    def _run(self, request: Request) -> Any:
        pending = [request]
        while pending:
            kind, what, rank = asked = pending[-1]
            if asked in self._known:
                pending.pop()
                continue
            try:
                made = {"value": self._value, "source": self._source, "call": self._call}[kind](what, rank)
            except _NeededError as needed:
                pending += needed.args
                continue
            except _REFUSALS as error:
                name = called(what) if kind == "call" else kind
                made = CannotRunError(f"{name}: {str(error).splitlines()[0]}")
                made.__cause__ = error
                if kind != "call":
                    raise made from error
            self._num_elements += made.numel() if isinstance(made, torch.Tensor) else 1
            if self._num_elements > MAX_ELEMENTS or len(self._known) > MAX_TERMS:
                raise CannotRunError("it is too large")
            self._known[asked] = made
        return self._known[request]

    def _all(self, *requests: Request) -> list[Any]:
        """Returns what requests ask for, if all of it was made; their request is tried again when it was."""
        if missing := [each for each in requests if each not in self._known]:
            raise _NeededError(*missing)
        return [self._known[each] for each in requests]

    def _one(self, kind: Kind, what: Any, rank: int) -> Any:
        return self._all((kind, what, rank))[0]

    def _value(self, number: int, rank: int) -> Any:
        value = self.values[number]
        if value.pieces is None:
            return self._one("source", value.source, rank)
        if value.numel > MAX_ELEMENTS:
            raise CannotRunError("it is too large")
        sources = self._all(*(("source", piece.source, rank) for piece in value.pieces))
        result = torch.empty(value.numel, dtype=value.dtype, device="cpu")
        for piece, data in zip(value.pieces, sources, strict=True):
            sizes, places, reads = zip(*piece.dims, strict=True) if piece.dims else ((), (), ())
            part = strided(data.view(value.dtype), sizes, reads, piece.offset)
            torch.as_strided(result, sizes, places, piece.start).copy_(part)
        return result.reshape(value.shape or ())

    def _source(self, source: int, rank: int) -> Any:
        key = self.values.key(source)
        match key:
            case ["constant", dtype, text, number]:
                return torch.full((1,), float(text) if number is None else number, dtype=dtype, device="cpu")
            case ["padding", _, dtype, [text, number], *_]:
                fill = float(text) if number is None else number
                return torch.full((self.values.numel(source),), fill, dtype=dtype, device="cpu")
            case Term("remote", (group,) | (group, _, _), _, (of,)):
                num_ranks = self.values.numel(source) // self.values.numel(of)
                return torch.cat(self._of_ranks("source", of, num_ranks, group, rank))
            case Term("remote"):
                raise CannotRunError("other ranks may gather something else")
            case Term("told", (group, of, own, offsets), _, (_, *_) as sources) if rank == 0:
                other = self.bits[group] if of != own else 0
                return self._one("source", sources[own], other)[offsets[own]].reshape(1)
            case Term("tensor", (number,)):
                return self._one("value", number, rank).reshape(-1)
            case Term(kind, parameters, read_as, operands):
                given = self._all(*(("source", each, rank) for each in operands))
                given = [data if read_as is None else data.view(read_as) for data in given]
                return KINDS[kind].compute(*given, *parameters)  # type: ignore[misc]
            case ["random state"]:
                return torch.Generator().manual_seed(self.seed + rank).get_state()
            case ["random state after", call]:
                done = self._one("call", call, rank)
                if isinstance(done, Exception):
                    raise done
                return done[2]
            case ["result", ["input", name], _, dtype, _, shape]:
                return self._input((name, rank), dtype, math.prod(shape))
            case ["result", ["attribute", bits, *_], *_] if bits in self.constants:
                return self.constants[bits].detach().cpu().reshape(-1)
            case ["result", ["size", int(number)], *_]:
                return number
            case ["result", ["input", _], None, None]:
                return 0.375 + self.seed + rank
            case ["result", call, part, *kind]:
                is_written = call[0] == "written" and len(call) == 3
                done = self._one("call", call[2] if is_written else call, rank)
                if isinstance(done, Exception):
                    return self._stand_in(source, done, kind, rank)
                # Of one element of lists, one tensor is written.
                made = done[1][call[1] if type(call[1]) is int else 0] if is_written else done[0]
                made = made if part is None else made[part]
                # In place it is cast to the dtype of what it is written into.
                return made.reshape(-1).to(kind[0]) if isinstance(made, torch.Tensor) else made
        raise CannotRunError(f"{key[0]} has no value on one rank")

    def _stand_in(self, source: int, error: Exception, kind: Any, rank: int) -> torch.Tensor:
        """Returns random numbers for what a call makes that cannot be run, if both graphs have it."""
        if source not in self.common or len(kind) != 3 or self.values.key(source)[1][0] in _MEMORY:
            raise error
        self.stood_in[str(error).partition(":")[0]] = None
        dtype, _, shape = kind
        return self._input(("stand-in", source, rank), dtype, math.prod(shape))

    def _of_ranks(self, kind: Kind, what: Any, num_ranks: int, group: str, rank: int) -> list[torch.Tensor]:
        """Returns what the ranks of the group have in which a rank is."""
        bit = self.bits[group]
        first, other = self._all((kind, what, rank & ~bit), (kind, what, rank | bit))
        return [first, *[other] * (num_ranks - 1)]

    def _input(self, name: Hashable, dtype: torch.dtype, numel: int) -> torch.Tensor:
        if numel > MAX_ELEMENTS:
            raise CannotRunError("it is too large")
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {self.seed}".encode()))
        if not dtype.is_floating_point and not dtype.is_complex:
            return torch.randint(0, 2, (numel,), generator=generator, device="cpu").to(dtype)
        # Of the second seed only positive ones: logarithms, roots and variances take them.
        draw = torch.randn if self.seed == 0 else torch.rand
        return draw(numel, generator=generator).to(dtype)

    # ---- calls: what they return, what they write, and the state of random numbers after them -------------

    def _call(self, key: Any, rank: int) -> Any:
        match key:
            case ["drawn", call, state]:
                return self._operator(call, rank, self._one("source", state, rank))
            case ["call", *_]:
                return self._operator(key, rank, None)
            case ["collective", str(name), args, []]:
                return self._collective(name, args, rank), [], None
            case ["part of memory", number, held, seen, None]:
                data = self._one("value", number, rank)
                return view_of(buffer_of(data, held), seen).clone(), [], None
            case ["written in part", old, held, seen, new]:
                data, written = self._all(("value", old, rank), ("value", new, rank))
                buffer = buffer_of(data, held)
                view_of(buffer, seen).copy_(written)
                return view_of(buffer, held).clone(), [], None
        raise CannotRunError(f"{key[0]} has no value on one rank")

    def _operator(self, key: Any, rank: int, state: torch.Tensor | None) -> Any:
        _, name, args, kwargs, *overlaps = key
        text = name[0] if isinstance(name, tuple) else name
        if not text.startswith(_FUNCTIONS if isinstance(name, tuple) else _LIBRARIES):
            raise ValueError("only ATen's operators are run here")
        given = self._thawed(args, rank)
        named = {keyword: self._thawed(value, rank) for keyword, value in kwargs}
        if isinstance(name, tuple):
            return self.functions[name[1]](*given, **named), [], None
        target = attrgetter(name)(torch.ops)
        (schema,) = schemas(target)
        places = {argument.name: argument for argument in schema.arguments}
        arguments = {**dict(zip(places, given, strict=False)), **named}
        if overlaps:
            arguments |= in_one_memory(overlaps[1], arguments)
        if would_end_process(name, arguments):
            raise CannotRunError(f"{name} is given sizes that it does not check")
        written: list[torch.Tensor] = []
        is_on_lists = is_elementwise_on_lists(target)
        for argument in [place for name, place in places.items() if name in arguments]:
            value = arguments[argument.name]
            if argument.is_write and isinstance(value, torch.Tensor):
                value = value if overlaps else value.clone()
                written.append(value)
            if is_on_lists and str(argument.type).startswith("List") and not isinstance(value, list):
                value = [value]
            arguments[argument.name] = value
        if state is not None:
            torch.set_rng_state(state)
        result = target(**arguments)
        if is_on_lists and isinstance(result, (list, tuple)):
            result = result[0]
        return result, written, torch.get_rng_state()

    def _collective(self, name: str, args: Any, rank: int) -> torch.Tensor:
        operator, group = name.split(".")[1], args[-1][1]
        place = int(bool(rank & self.bits[group]))  # in its group
        if operator == "all_to_all_single":
            outputs, inputs = ([size for _, size in sizes] for sizes in args[1:3])
            part = min(place, len(inputs) - 1)
            if any(size != inputs[part] for size in outputs):  # not all ranks cut alike
                raise CannotRunError(f"{name} needs other ranks")
            sent = self._of_ranks("value", args[0][1].number, len(inputs), group, rank)
            return torch.cat([each.split(inputs)[part] for each in sent])  # type: ignore[no-untyped-call]
        if operator == "all_reduce":
            num_ranks = len(named_group_ranks(group))
        elif operator in ("reduce_scatter_tensor", "all_gather_into_tensor"):
            num_ranks = args[-2][1]
        else:
            raise CannotRunError(f"{name} needs other ranks")
        sent = self._of_ranks("value", args[0][1].number, num_ranks, group, rank)
        if operator == "all_gather_into_tensor":
            return torch.cat(sent)
        total = _REDUCTIONS[args[1][1]](torch.stack(sent)).to(sent[0].dtype)
        return total if operator == "all_reduce" else total.chunk(num_ranks)[min(place, num_ranks - 1)]

    def _thawed(self, frozen: Any, rank: int) -> Any:
        """Returns an argument of which :func:`freeze` made a key."""
        if len(frozen) != 2 or not isinstance(frozen[0], type):
            return [self._thawed(each, rank) for each in frozen]
        kind, value = frozen
        if kind is Argument:
            made = self._one("value", value.number, rank)
            return laid_out(made, value.layout) if isinstance(made, torch.Tensor) else made
        if kind is complex:
            return complex(*map(float.fromhex, value))
        if kind is float:
            return float.fromhex(value)
        return torch.device("cpu") if kind is torch.device else value
