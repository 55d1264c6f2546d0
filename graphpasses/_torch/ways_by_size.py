"""Which numbers of rows a function of torch computes by other operators than any other number, asked of it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphpasses._torch.conditions import sizes_at_zero
from graphpasses._torch.fake_mode import fake_errors_unlogged, real_tensors
from graphpasses._torch.operator_facts import autograd_node, computes_nothing
from graphpasses._torch.pytree import tree_leaves, tree_map
from graphpasses._torch.symbols import expression

MANY = 61  # rows: a prime, which is no size of a tensor's; a GRU goes through them one by one

Sizes = Mapping[sympy.Symbol, int]


class WaysBySize:
    """Asks functions of torch whether they go other ways for some sizes than for others, each of a kind once."""

    def __init__(self) -> None:
        self._found: dict[str, _Found | None] = {}
        self._last: _Found | None = None
        self._runs = False
        self._nodes: set[str] = set()

    def differing(self, func: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[sympy.Symbol, int, bool]]:
        """Returns sizes that only running tells, and values at which a function computes otherwise than usual.

        Values are 0, 1, and those that make a tensor contiguous. What its gradients call counts, too. The third says
        whether it makes a difference: none if there are no rows to compute, and nothing is called. A function that
        cannot be asked, as it looks at values, has none.
        """
        leaves, self._last = tree_leaves((args, kwargs)), None
        if not all(map(_is_plain, leaves)):
            return []
        if not (symbols := unknown_sizes(leaves)):
            return []
        names = {symbol: sympy.Symbol(f"n{index}") for index, symbol in enumerate(symbols)}
        key = f"{func} {tree_map(lambda leaf: _kind(leaf, names), (args, kwargs))}"
        if key not in self._found:
            self._found[key] = _ask(func, args, kwargs, symbols)
        if (found := self._found[key]) is None:
            return []
        self._last = found
        self._nodes |= found.nodes
        return [(symbols[index], *others) for index, *others in found.differing]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds the function, which was asked last."""
        self._runs = self._last is not None
        try:
            yield
        finally:
            self._runs = False

    def is_asked(self) -> bool:
        """Whether what runs now was asked: a function, or a node of autograd that is as one of those asked."""
        return self._runs or autograd_node() in self._nodes


@dataclass(frozen=True, slots=True)
class _Found:
    differing: list[tuple[int, int, bool]]  # of which symbol, at which value, and whether it makes a difference
    nodes: set[str]  # of autograd


@dataclass(frozen=True, slots=True)
class _Part:
    """What a function calls, or its gradients."""

    calls: list[str]  # of operators, each with the number of dims of its tensors
    dims: list[int]  # of its results
    is_empty: bool = field(compare=False)  # no result has elements


@dataclass(frozen=True, slots=True)
class Way:
    """What a function calls for some sizes, or numbers."""

    parts: tuple[_Part, _Part]
    nodes: set[str]  # of autograd


_RAISES = Way((_Part(["an error"], [], is_empty=False),) * 2, set())


def _makes_a_difference(part: _Part, usual: _Part) -> bool:
    return part != usual and (bool(part.calls) or not part.is_empty)


def _ask(func: Callable[..., Any], args: Any, kwargs: Any, symbols: Sequence[sympy.Symbol]) -> _Found | None:
    many, found = dict.fromkeys(symbols, MANY), []
    if (usual := way(func, args, kwargs, many)) is None:
        return None
    for index, symbol in enumerate(symbols):
        for value in sorted({0, 1, *_contiguous_at(tree_leaves((args, kwargs)), symbol)}):
            # Where two sizes are one number of rows, the function takes them together alone.
            tried = ({**many, symbol: value}, dict.fromkeys(symbols, value))
            ways = (way(func, args, kwargs, sizes) for sizes in tried)
            other = next((each for each in ways if each is not None), _RAISES)
            if other.parts != usual.parts:
                found.append((index, value, any(map(_makes_a_difference, other.parts, usual.parts))))
    return _Found(found, usual.nodes)


def _dims(args: Any) -> str:
    return str([leaf.dim() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)])


def way(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    sizes: Sizes,
    floats: Mapping[int, float] = MappingProxyType({}),
    spelled: Callable[[Any], Any] = _dims,
) -> Way | None:
    """Returns what a function and its gradients call for sizes that only running tells; None if it raises.

    So for ``floats``, by the identity of their nodes, 2 where none is given; ``spelled`` tells what counts of
    operators' arguments.
    """
    forward, backward = _Called(spelled), _Called(spelled)
    with _may_raise(), _apart():
        args, kwargs = tree_map(lambda leaf: _with_sizes(leaf, sizes, floats), (args, kwargs))
        with forward:
            result = func(*args, **kwargs)
        made, inputs = (
            [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)] for of in (result, (args, kwargs))
        )
        trained, grown = ([leaf for leaf in leaves if leaf.requires_grad] for leaves in (inputs, made))
        nodes = _nodes([leaf.grad_fn for leaf in grown])
        grads: tuple[torch.Tensor | None, ...] = ()
        if trained and grown:
            given = [torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in grown]
            with backward:
                grads = torch.autograd.grad(grown, trained, given, allow_unused=True)
        parts = ((forward, made), (backward, [grad for grad in grads if grad is not None]))
        first, second = (
            _Part(called.calls, [each.dim() for each in of], is_empty=not any(each.numel() for each in of))
            for called, of in parts
        )
        return Way((first, second), nodes)
    return None


def _nodes(pending: list[Any]) -> set[str]:
    """Returns the names of nodes of autograd, and of those before them."""
    found = set()
    while pending:
        if (node := pending.pop()) is not None and node not in found:
            found.add(node)
            pending += (before for before, _ in node.next_functions)
    return {node.name() for node in found}


@contextmanager
def _may_raise() -> Iterator[None]:
    """Ends the block where it raises an error, and keeps none of its frames, which hold tensors of the trace."""
    try:
        yield
    except Exception as error:
        each: BaseException | None = error
        while each is not None:
            each.__traceback__, each = None, each.__context__


@contextmanager
def _apart() -> Iterator[None]:
    """Calls functions on fake tensors of known sizes, which nobody traces, saves, records or logs."""
    with (
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),  # not a checkpoint's
        mock.patch.object(torch.autograd, "_engine_run_backward", _engine_run_backward),
        warnings.catch_warnings(action="ignore"),
        fake_errors_unlogged(),
        real_tensors(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        FakeTensorMode(shape_env=ShapeEnv()),
    ):
        yield


class _Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, spelled: Callable[[Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []
        self._spelled = spelled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not computes_nothing(func):
            self.calls.append(f"{func} {self._spelled((args, kwargs))}")
        return func(*args, **(kwargs or {}))


def _is_plain(leaf: Any) -> bool:
    is_tensor = isinstance(leaf, torch.Tensor)
    return not is_tensor or (type(leaf) in (FakeTensor, torch.Tensor, nn.Parameter) and leaf.layout is torch.strided)


def _numbers(leaf: Any) -> Sequence[Any]:
    if isinstance(leaf, torch.Tensor):
        return (*leaf.shape, *leaf.stride(), leaf.storage_offset())
    return (leaf,)


def unknown_sizes(leaves: Sequence[Any]) -> list[sympy.Symbol]:
    """Returns the symbols of tensors' sizes, and of numbers, that only running tells."""
    numbers = (number for leaf in leaves for number in _numbers(leaf) if isinstance(number, torch.SymInt))
    return list(dict.fromkeys(each for number in numbers for each in sorted(free_unbacked_symbols(number), key=str)))


def _kind(leaf: Any, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Any:
    numbers = [n.node.expr.xreplace(names) if isinstance(n, torch.SymInt) else n for n in _numbers(leaf)]
    if not isinstance(leaf, torch.Tensor):
        return str(*numbers)
    return f"{numbers} {leaf.dtype} {leaf.device} {leaf.requires_grad}"


def _with_sizes(leaf: Any, sizes: Sizes, floats: Mapping[int, float]) -> Any:
    if isinstance(leaf, torch.SymInt):
        return _value(leaf, sizes)
    if isinstance(leaf, (torch.SymFloat, torch.SymBool)):
        return floats.get(id(leaf.node), 2.0) if isinstance(leaf, torch.SymFloat) else True
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape, stride = ([_value(number, sizes) for number in numbers] for numbers in (leaf.shape, leaf.stride()))
    made = torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def _value(number: int | torch.SymInt, sizes: Sizes) -> int:
    if not isinstance(number, torch.SymInt):
        return number
    shape_env: ShapeEnv = number.node.shape_env
    return int(number.node.expr.xreplace({**shape_env.backed_var_to_val, **sizes}))


def _contiguous_at(leaves: Sequence[Any], symbol: sympy.Symbol) -> Iterator[int]:
    """Yields sizes at which a dim of a tensor follows on the next one."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            dims = zip(map(expression, leaf.shape), map(expression, leaf.stride()), strict=True)
            for (_, stride), (size, inner) in itertools.pairwise(dims):
                yield from sizes_at_zero(stride - size * inner, symbol)
