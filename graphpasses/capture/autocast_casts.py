"""Casts of weights under autocast, in graphs of ``torch.compile`` as in eager: one for all uses of a weight.

Autocast keeps the cast of a float32 leaf until its outermost block ends, so gradients of a weight's uses are added in
the low precision. AOTAutograd traces without that cache: each use would have a cast of its own, and gradients would
be added in float32. Source: ``aten/src/ATen/autocast_mode.cpp`` (``cached_cast``).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpasses._torch.schemas import SET_GRAD_ENABLED, is_higher_order
from graphpasses._torch.surroundings import ENTER, EXIT, casts_in, is_cast
from graphpasses.errors import UnsupportedError
from graphpasses.graph.nodes import source_line


def cast_once(module: fx.GraphModule) -> list[int]:
    """Gives the parameters of a Dynamo graph one cast for all their uses under one autocast.

    Returns:
        Positions of the inputs that it casts.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    weights = {node for node in placeholders if _is_weight(node.meta.get("example_value"))}
    around = any(torch.is_autocast_enabled(kind) for kind in {_value(node).device.type for node in weights})
    users: dict[tuple[fx.Node, int, torch.dtype], list[tuple[fx.Node, int]]] = defaultdict(list)
    for node, block, regions in _under_autocast(module.graph, around):
        for weight in dict.fromkeys(each for each in node.all_input_nodes if each in weights):
            for dtype, count in _casts(module, node, weight, regions):
                users[weight, block, dtype].append((node, count))
    for (weight, _, dtype), uses in users.items():
        if sum(count for _, count in uses) < 2:
            continue
        nodes = [node for node, _ in uses]
        if any(map(is_higher_order, nodes)):
            raise UnsupportedError(
                f"autocast casts the weight of {weight.name!r} once for several uses, some of them in a checkpointed "
                "function, and a compiled graph would cast it for each. Give torch.autocast(..., "
                "cache_enabled=False) in both runs"
            )
        with module.graph.inserting_before(nodes[0]):
            cast = module.graph.call_method("to", (weight, dtype))
        cast.meta["example_value"] = _value(weight).to(dtype)
        for node in nodes:
            node.replace_input_with(weight, cast)
    module.recompile()
    cast_weights = {weight for weight, *_ in users}
    return [index for index, node in enumerate(placeholders) if node in cast_weights]


def _is_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf and value.dtype == torch.float32


def _value(node: fx.Node) -> Any:
    return node.meta["example_value"]


def _under_autocast(graph: fx.Graph, around: bool) -> Iterator[tuple[fx.Node, int, list[tuple[Any, ...]]]]:
    """Yields calls with gradients under autocast: the number of the outermost block, and the blocks in the graph."""
    regions: dict[fx.Node, tuple[Any, ...]] = {}
    number, with_gradients = 0, True  # of casts without gradients it counts that they are not those with
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            with_gradients = node.args[0]
        if node.target is ENTER:
            number += not (regions or around)
            regions[node] = node.args
        elif node.target is EXIT:
            del regions[node.args[0]]
        elif with_gradients and node.op in ("call_function", "call_method") and (regions or around):
            yield node, number, [*regions.values()]


def _casts(
    module: fx.GraphModule, node: fx.Node, parameter: fx.Node, regions: Sequence[tuple[Any, ...]]
) -> list[tuple[torch.dtype, int]]:
    """Asks autocast for the casts of a weight that it makes for a call, and would keep for the next one."""
    if str(node.target).endswith("_"):  # it writes, and is not asked
        return []

    weight = _value(parameter).detach().requires_grad_()  # of which nothing is kept yet

    def given(each: fx.Node) -> Any:
        if each is parameter:
            return weight
        return getattr(module, str(each.target)) if each.op == "get_attr" else _value(each)

    args: Any = fx.map_arg(node.args, given)
    kwargs: Any = fx.map_arg(node.kwargs, given)
    call: Any = node.target
    if node.op == "call_method":
        call, args = getattr(args[0], str(node.target)), args[1:]
    with _entered(regions, weight, cache_enabled=False):
        every = casts_in(call, args, kwargs, weight)
    with _entered(regions, weight, cache_enabled=None):
        first, second = (casts_in(call, args, kwargs, weight) for _ in range(2))
    return [(dtype, every.count(dtype)) for dtype in dict.fromkeys(first) if dtype not in second]


@contextmanager
def _entered(regions: Sequence[tuple[Any, ...]], weight: Tensor, cache_enabled: bool | None) -> Iterator[None]:
    """Enters the blocks of autocast of a call; those that are around the graph are entered."""
    with ExitStack() as stack:
        for device, dtype, enabled, cache in regions:
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled if cache is None else cache))
        if not regions:
            stack.enter_context(torch.autocast(weight.device.type, cache_enabled=cache_enabled))
        yield


def autocasts_around() -> dict[str, torch.dtype]:
    """Returns the dtype of each autocast that is on, by the type of its device."""
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}


def find_cast(nodes: Iterable[fx.Node], around: Mapping[str, torch.dtype]) -> str | None:
    """Says which of a backward's calls autocasts would cast, if it ran in their blocks."""
    with ExitStack() as stack:
        for kind, dtype in around.items():
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        node = next(filter(is_cast, nodes), None) if around else None
    return None if node is None else f"{node.target} ({source_line(node)})"


class _Block(threading.local):
    """An autocast around compiled graphs: what it casts a weight of ours with, and the weights that they cast."""

    def __init__(self) -> None:
        self.own: dict[str, nn.Parameter] = {}
        self.cast: dict[str, Any] = {}
        self.weights: dict[str, set[int]] = {}


_BLOCK = _Block()


def _cast_around(kind: str) -> set[int]:
    """Returns the weights that graphs have cast since the autocast around them was entered."""
    if kind not in _BLOCK.own:
        _BLOCK.own[kind] = nn.Parameter(torch.zeros(1, 1, device=kind))
    function: Any = torch.mm(_BLOCK.own[kind], _BLOCK.own[kind]).grad_fn
    cast = function.next_functions[0][0]  # autocast keeps it, too: in another block it is another one
    if cast is not _BLOCK.cast.get(kind):
        _BLOCK.cast[kind], _BLOCK.weights[kind] = cast, set()
    return _BLOCK.weights[kind]


def check_cast_once(weights: Mapping[str, Tensor], in_this_call: set[int]) -> None:
    """Refuses a second graph that casts a weight, for gradients, where eager makes one cast for both.

    Args:
        weights: those that a graph, which is about to run, casts, by name.
        in_this_call: which graphs of one call have cast, by ``id``: between them there may be a graph break in an
            autocast.
    """
    if not torch.is_grad_enabled():
        return
    kinds = {weight.device.type for weight in weights.values()}
    casts = {kind: _cast_around(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    for name, weight in weights.items():
        cast = casts.get(weight.device.type, in_this_call)
        if id(weight) in cast:
            raise UnsupportedError(
                f"two compiled graphs use parameter {name!r} under one autocast: eager casts it once for both, and "
                "adds the gradients of its uses in the low precision. Enter autocast in the compiled function, or "
                "anew for each call, and break no graph in it, or give torch.autocast(..., cache_enabled=False), "
                "in both runs"
            )
        cast.add(id(weight))
