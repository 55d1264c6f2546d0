"""Wrong rewrites of what a graph does: of collectives and their waits, writes, and random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from experiments.mutants.edits import Copy, Edit, alike, calls, insert_after
from graphpasses._torch.schemas import is_seeded, writes_arguments
from graphpasses.graph import WAIT, TrainGraph, argument, is_collective, wait_of
from graphpasses.graph.nodes import collective_group
from graphpasses.ops.random_state import READ_RANDOM_STATE, SET_RANDOM_STATE

__all__ = ["EFFECT_MUTATORS"]

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Mutator = Callable[[TrainGraph], Iterator[Edit]]

_REDUCTIONS = (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default)
_JOINS = (aten.cat.default, aten._chunk_cat.default)
_SPLITS = (aten.split_with_sizes.default, aten.split_with_sizes_copy.default)


def _collectives(graph: TrainGraph) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if is_collective(node)]


def _become(node: fx.Node, index: int, value: Any) -> Callable[[Copy], None]:
    def apply(copy: Copy) -> None:
        args = list(copy[node].args)
        args[index] = value
        copy[node].args = tuple(args)

    return apply


# ---- collectives ---------------------------------------------------------------------------------------


def other_group(graph: TrainGraph) -> Iterator[Edit]:
    """A collective is one of other ranks."""
    groups = {collective_group(node) for node in _collectives(graph)}
    for node in _collectives(graph):
        for group in sorted(groups - {collective_group(node)}):
            index = node.args.index(collective_group(node))
            yield Edit("group", f"{node} in group {group}", _become(node, index, group))


def other_reduction(graph: TrainGraph) -> Iterator[Edit]:
    """A reduction is another one, in another dtype, or of zeros."""

    def send(node: fx.Node, target: Any, **kwargs: Any) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            launch, wait = copy[node], copy[wait_of(node)]
            source = argument(launch)
            with copy.graph.graph.inserting_before(launch):
                sent = copy.graph.emit(target, (source,), kwargs, like=launch)
            launch.replace_input_with(source, sent)
            if kwargs:
                insert_after(copy, wait, aten._to_copy.default, dtype=source.meta["val"].dtype)

        return apply

    for node in _collectives(graph):
        if node.target not in _REDUCTIONS or len(node.args) < 2:  # an attack gives it arguments by name
            continue
        for op in ("sum", "avg", "max"):
            if op != node.args[1]:
                yield Edit("scale", f"{node} is {op}, not {node.args[1]}", _become(node, 1, op))
        yield Edit("scale", f"{node} reduces zeros", send(node, aten.zeros_like.default))
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            if argument(node).meta["val"].dtype is not dtype:
                text = f"{node} reduces in {dtype}"
                yield Edit("dtype", text, send(node, aten._to_copy.default, dtype=dtype))


def permute_bucket(graph: TrainGraph) -> Iterator[Edit]:
    """Two members of a reduction are packed and unpacked in each other's place, where ranks add in another order."""

    def exchange(pack: fx.Node, one: fx.Node, other: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            members = list(copy[pack].args[0])
            i, j = one.args[1], other.args[1]
            members[i], members[j] = members[j], members[i]
            copy[pack].args = (members, *copy[pack].args[1:])
            copy[one].args, copy[other].args = (copy[one].args[0], j), (copy[other].args[0], i)

        return apply

    for launch in graph.graph.nodes:
        if launch.target not in _REDUCTIONS or argument(launch).target not in _JOINS:
            continue
        pack, split = argument(launch), wait_of(launch)
        while split.target not in _SPLITS and len(split.users) == 1:
            (split,) = split.users
        if split.target not in _SPLITS:
            continue
        for one, other in itertools.combinations(split.users, 2):
            if alike(one, other):
                text = f"members {one.args[1]} and {other.args[1]} of {pack} exchanged, as of {split}"
                yield Edit("bucket", text, exchange(pack, one, other))


def wrong_waits(graph: TrainGraph) -> Iterator[Edit]:
    """A result is read before it is there; two waits wait for each other's collective."""

    def drop(wait: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            copy[wait].replace_all_uses_with(argument(copy[wait]))
            copy.graph.graph.erase_node(copy[wait])

        return apply

    def read_early(wait: fx.Node, user: fx.Node) -> Callable[[Copy], None]:
        return lambda copy: copy[user].replace_input_with(copy[wait], argument(copy[wait]))

    def copy_early(wait: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            launch, users = argument(copy[wait]), list(copy[wait].users)
            early = copy.after(launch, aten.clone.default, launch)
            for user in users[:1]:
                user.replace_input_with(copy[wait], early)

        return apply

    def late(launch: fx.Node) -> Callable[[Copy], None]:
        """What the collective sends is written before it is waited for."""
        return lambda copy: copy.after(copy[launch], aten.zero_.default, argument(copy[launch]))

    waits = graph.graph.find_nodes(op="call_function", target=WAIT)
    for wait in waits:
        yield Edit("wait", f"{wait} is dropped", drop(wait))
        yield Edit("wait", f"{argument(wait)} is copied before {wait}", copy_early(wait))
        for user in list(wait.users)[:2]:
            yield Edit("wait", f"{user} does not wait for {argument(wait)}", read_early(wait, user))
        yield Edit("write", f"what {argument(wait)} sends is zeroed before {wait}", late(argument(wait)))


def exchange_on_one_rank(graph: TrainGraph) -> Iterator[Edit]:
    """Two collectives are launched in the other order by the last rank."""

    def exchange(one: fx.Node, other: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            copy[other].append(copy[one])

        return apply

    launches = _collectives(graph)
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    for one, other in itertools.pairwise(launches):
        if position[wait_of(one)] > position[other]:
            yield Edit("one rank", f"{one} after {other} on one rank", exchange(one, other), rank=-1)
    for one, other in itertools.combinations(launches, 2):
        if alike(argument(one), argument(other)) and position[argument(other)] < position[one]:

            def swap(copy: Copy, one: fx.Node = one, other: fx.Node = other) -> None:
                a, b = copy[one], copy[other]
                a.args, b.args = b.args, a.args
                a.target, b.target = b.target, a.target
                swapped = {copy[wait_of(one)]: b, copy[wait_of(other)]: a}
                for wait, launch in swapped.items():
                    wait.replace_input_with(argument(wait), launch)

            if position[wait_of(one)] > position[other]:
                yield Edit("one rank", f"{one} and {other} exchanged on one rank", swap, rank=-1)


# ---- writes --------------------------------------------------------------------------------------------


def write(graph: TrainGraph) -> Iterator[Edit]:
    """What is read later is written: by a new write, or by one that moves, is dropped or is done twice."""
    written = [node for node in calls(graph) if writes_arguments(node.target)]
    writers = {aten.zero_.default: (), aten.mul_.Tensor: (0.5,), aten.neg_.default: ()}

    def write_after(node: fx.Node, target: Any, args: tuple[Any, ...]) -> Callable[[Copy], object]:
        return lambda copy: copy.after(copy[node], target, copy[node], *args)

    def copy_into(node: fx.Node, source: fx.Node) -> Callable[[Copy], object]:
        return lambda copy: copy.after(copy[source], aten.copy_.default, copy[node], copy[source])

    def view_and_write(node: fx.Node, target: Any, args: tuple[Any, ...]) -> Callable[[Copy], object]:
        def apply(copy: Copy) -> None:
            reader = min(copy[node].users)
            view = copy.after(reader, aten.view.default, copy[node], [-1])
            copy.after(view, target, view, *args)

        return apply

    for node in graph.graph.nodes:
        value = node.meta.get("val")
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and not is_collective(node)
        if not is_float or node.op == "output" or not node.users:
            continue
        for target, args in writers.items():
            if node.op == "call_function":
                yield Edit("write", f"{node} is written by {target}", write_after(node, target, args))
            if len(node.users) > 1 and value.is_contiguous() and node.op != "get_attr":
                text = f"{node} is written by {target} through a view after {min(node.users)}"
                yield Edit("write", text, view_and_write(node, target, args))
        earlier = next((each for each in graph.placeholders if alike(each, node) and node.op != "placeholder"), None)
        if earlier is not None:
            yield Edit("write", f"{node} is copied into {earlier}", copy_into(earlier, node))
    for node in written:
        yield from _move_write(graph, node)


def _move_write(graph: TrainGraph, node: fx.Node) -> Iterator[Edit]:
    inputs = node.all_input_nodes

    def early(copy: Copy) -> None:
        max(copy[each] for each in inputs).append(copy[node])

    def drop(copy: Copy) -> None:
        copy[node].replace_all_uses_with(copy[inputs[0]])
        copy.graph.graph.erase_node(copy[node])

    def double(copy: Copy) -> None:
        copy.after(copy[node], node.target, *copy[node].args, **copy[node].kwargs)

    if all(each.op != "placeholder" for each in inputs[1:]) and inputs[1:]:
        yield Edit("write", f"{node} as early as it can be", early)
    if inputs:
        yield Edit("write", f"{node} is dropped", drop)
    yield Edit("write", f"{node} is done twice", double)


# ---- random numbers ------------------------------------------------------------------------------------


def other_random_numbers(graph: TrainGraph) -> Iterator[Edit]:
    """What is drawn is drawn anew for one reader, drawn in another order, or from another state."""
    drawn = [node for node in calls(graph) if is_seeded(node.target)]
    states = graph.graph.find_nodes(op="call_function", target=READ_RANDOM_STATE)
    sets = graph.graph.find_nodes(op="call_function", target=SET_RANDOM_STATE)

    def draw_anew(node: fx.Node, reader: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            with copy.graph.graph.inserting_before(copy[reader]):
                again = copy.graph.emit_copy(copy[node], {})
            copy[reader].replace_input_with(copy[node], again)

        return apply

    def draw_more(node: fx.Node) -> Callable[[Copy], None]:
        def apply(copy: Copy) -> None:
            with copy.graph.graph.inserting_before(copy[node]):
                more = copy.graph.emit_copy(copy[node], {})
            copy[node].replace_all_uses_with(more)

        return apply

    def draw_first(one: fx.Node, other: fx.Node) -> Callable[[Copy], None]:
        return lambda copy: copy[one].prepend(copy[other])

    def erase(node: fx.Node) -> Callable[[Copy], None]:
        return lambda copy: copy.graph.graph.erase_node(copy[node])

    def set_other(node: fx.Node, state: fx.Node) -> Callable[[Copy], None]:
        return lambda copy: copy[node].replace_input_with(argument(copy[node]), copy[state])

    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    for node in drawn:
        for reader in list(node.users):
            yield Edit("random", f"{reader} reads another draw than {node}", draw_anew(node, reader))
        if node.users:
            yield Edit("random", f"{node} is drawn twice", draw_more(node))
    for one, other in itertools.combinations(drawn, 2):
        if all(position[each] < position[one] for each in other.all_input_nodes):
            yield Edit("random", f"{other} is drawn before {one}", draw_first(one, other))
    for node in sets:
        yield Edit("random", f"{node} is dropped", erase(node))
        for state in states:
            if state is not argument(node) and position[state] < position[node]:
                yield Edit("random", f"{node} sets {state}", set_other(node, state))


EFFECT_MUTATORS: tuple[Mutator, ...] = (
    other_group,
    other_reduction,
    permute_bucket,
    wrong_waits,
    exchange_on_one_rank,
    write,
    other_random_numbers,
)
