"""Run one graph on all ranks of a simulated cluster, and keep every bit that it leaves."""

from __future__ import annotations

import functools
import multiprocessing
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphpasses._torch.group_ranks import mesh_group_names
from graphpasses.errors import ClusterError
from graphpasses.graph import WAIT, GraphInput, Stage, TrainGraph, is_collective
from graphpasses.graph.nodes import collective_group
from graphpasses.simulate import Topology, run_cluster

__all__ = [
    "Cluster",
    "Inputs",
    "Outcome",
    "copy_value",
    "group_names",
    "random_value",
    "run",
    "run_apart",
    "saved_values",
]

Inputs = Callable[[GraphInput, Any, int], Any]
"""Makes the value of an input on a rank, given its fake value."""


@dataclass(frozen=True)
class Cluster:
    """The ranks on which a graph runs.

    Args:
        axes: sizes of the mesh, by name.
        names: what the graph's collectives call the groups of the axes, and of all ranks.
    """

    axes: Mapping[str, int]
    names: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return torch.Size(self.axes.values()).numel()

    @property
    def topology(self) -> Topology:
        """Of the ranks; where there are four, the order in which they add depends on the place in a bucket."""
        num_ranks = self.num_ranks
        return Topology(num_ranks, gpus_per_node=min(num_ranks, 2), mode="rail")

    def mesh(self) -> DeviceMesh:
        """Makes the mesh; all ranks call it."""
        return init_device_mesh("cpu", tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))


def group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns what collectives call the groups of a mesh, and that of all ranks."""
    assert dist.group.WORLD is not None
    return (*mesh_group_names(mesh), dist.group.WORLD.group_name)


@dataclass(frozen=True)
class Outcome:
    """What a run left.

    Args:
        failure: what ended it; empty if nothing did.
        is_hang: whether ranks waited for each other for ever, or met in different collectives.
        bits: by rank: of each output, of each input, written or not, and of the state of random numbers.
    """

    failure: str = ""
    is_hang: bool = False
    bits: tuple[Mapping[object, object], ...] = ()


def random_value(item: GraphInput, fake: Any, rank: int) -> Any:
    """Returns random values of an input's shape, dtype and strides, the same in all graphs that have the input.

    Args:
        item: what the input is.
        fake: its fake value.
        rank: whose value it is.
    """
    if not isinstance(fake, Tensor):
        return fake if isinstance(fake, int) else None
    generator = torch.Generator().manual_seed(zlib.crc32(f"{item} {rank}".encode()))
    shape, dtype = tuple(map(int, fake.shape)), fake.dtype
    if dtype == torch.uint8 and shape == generator.get_state().shape:
        return generator.get_state()  # saved for backward
    if dtype.is_floating_point:
        value = torch.randn(shape, generator=generator).to(dtype)
    else:
        value = torch.randint(2 if dtype == torch.bool else 8, shape, generator=generator).to(dtype)
    value = torch.empty_strided(shape, tuple(map(int, fake.stride())), dtype=dtype).copy_(value)
    return value.requires_grad_(fake.requires_grad)


def run_apart(graphs: Sequence[TrainGraph], inputs: Inputs, cluster: Cluster, *, is_late: bool = False) -> Outcome:
    """Runs a graph as :func:`run` does, in a process of its own, which it may end."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: theirs.send(run(graphs, inputs, cluster, is_late=is_late))
    )
    child.start()
    theirs.close()
    try:
        outcome: Outcome = ours.recv() if ours.poll(60) else Outcome("no end in a minute", is_hang=True)
    except EOFError:
        child.join()
        outcome = Outcome(f"the process ended with {child.exitcode}")
    child.kill()
    child.join()
    return outcome


def run(graphs: Sequence[TrainGraph], inputs: Inputs, cluster: Cluster, *, is_late: bool = False) -> Outcome:
    """Runs a graph on every rank.

    Args:
        graphs: one per rank.
        inputs: make what it is given.
        cluster: the ranks.
        is_late: whether a collective takes as long as it may: it reads its input and has a result when it is waited
            for, and what reads it before sees NaN. Else it is done when it is launched.
    """

    def play() -> Mapping[object, object]:
        rank = dist.get_rank()
        graph = graphs[rank]
        names = dict(zip(cluster.names, group_names(cluster.mesh()), strict=True))
        torch.manual_seed(rank)
        items = [_canonical(graph, item) for item in graph.inputs]
        given = {
            item: copy_value(inputs(item, node.meta.get("val"), rank))
            for item, node in zip(items, graph.placeholders, strict=True)
        }
        is_dynamo = graph.stage is Stage.DYNAMO
        with torch.set_grad_enabled(is_dynamo):
            outputs = _interpret(graph, [given[item] for item in items], names, is_late=is_late)
        left = dict(enumerate(outputs)) | given | {"random state": torch.get_rng_state()}
        if is_dynamo:
            left |= _gradients(outputs, given)
        return {key: _bits(value) for key, value in left.items()}

    try:
        return Outcome(bits=tuple(run_cluster(play, cluster.topology)))
    except ClusterError as error:
        text = str(error)
        is_hang = not isinstance(error.__context__, Exception) or isinstance(error.__context__, ClusterError)
        return Outcome(text.strip().splitlines()[-1], is_hang)


def saved_values(forward: TrainGraph, inputs: Inputs) -> dict[str, Any]:
    """Returns what a forward graph gives to the backward one, by the names of its nodes.

    Args:
        forward: the graph; no other rank has a part of it.
        inputs: make what it is given.
    """
    given = [
        copy_value(inputs(item, node.meta.get("val"), 0))
        for item, node in zip(forward.inputs, forward.placeholders, strict=True)
    ]
    with torch.no_grad():
        left = _interpret(forward, given, {}, is_late=False)
    return {
        node.name: copy_value(value)
        for node, value in zip(forward.output_values, left, strict=True)
        if isinstance(node, fx.Node)
    }


def _canonical(graph: TrainGraph, item: GraphInput) -> GraphInput:
    return replace(item, fqn=graph.identity.canonical(item.fqn)) if item.is_state else item


def copy_value(value: Any) -> Any:
    """Returns a tensor in memory of its own; what is none is itself."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _gradients(outputs: list[Any], given: Mapping[GraphInput, Any]) -> dict[object, Any]:
    total = sum(
        value.float().square().sum() for value in outputs if isinstance(value, Tensor) and value.requires_grad
    )
    leaves = {item: value for item, value in given.items() if isinstance(value, Tensor) and value.requires_grad}
    if not isinstance(total, Tensor):
        return {}
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {("gradient", item): value for item, value in zip(leaves, gradients, strict=True)}


def _bits(value: Any) -> object:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    raw = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else value.new_empty(0)
    return value.dtype, tuple(value.shape), raw.numpy().tobytes()


def _interpret(graph: TrainGraph, given: Sequence[Any], names: Mapping[str, str], *, is_late: bool) -> list[Any]:
    values: dict[fx.Node, Any] = {}
    launched: dict[fx.Node, Callable[[], Any]] = {}
    leaves = iter(given)

    def read(node: fx.Node) -> Any:
        if node in launched:  # not yet waited for
            return torch.full_like(launched[node](), _garbage(launched[node]()))
        return values[node]

    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(leaves)
        elif node.op == "get_attr":
            values[node] = copy_value(_attribute(graph.module, node.target))
        elif node.op == "output":
            return [read(each) if isinstance(each, fx.Node) else each for each in graph.output_values]
        elif node.op == "call_method":
            owner, *args = fx.node.map_arg(node.args, read)
            values[node] = getattr(owner, node.target)(*args, **fx.node.map_arg(node.kwargs, read))
        elif node.op == "call_module":
            module = graph.module.get_submodule(node.target)
            values[node] = module(*fx.node.map_arg(node.args, read), **fx.node.map_arg(node.kwargs, read))
        elif node.target is WAIT and is_late and node.args[0] in launched:
            launch = node.args[0]
            values[launch] = values[node] = launched.pop(launch)()
        else:
            args = fx.node.map_arg(node.args, read)
            kwargs = fx.node.map_arg(node.kwargs, read)
            if collective_group(node) is not None:
                args = tuple(names.get(arg, arg) if isinstance(arg, str) else arg for arg in args)
            call = functools.partial(node.target, *args, **kwargs)
            if not is_collective(node):
                values[node] = call()
            elif is_late:
                launched[node] = functools.partial(_wait, call)
            else:
                values[node] = _wait(call)
    raise AssertionError("a graph ends with its output")


def _wait(launch: Callable[[], Tensor]) -> Tensor:
    """Launches a collective and waits, also for one that the graph never waits for."""
    return WAIT(launch())


def _garbage(tensor: Tensor) -> float | int:
    return float("nan") if tensor.is_floating_point() else 1


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
