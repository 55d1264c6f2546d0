"""Runs a graph whose regions are compiled: one call for each, in the place of its operators."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import fx, nn

from graphpasses._torch import pytree
from graphpasses._torch.exact_kernels import Kernel, compile_exactly, trace_exactly
from graphpasses._torch.fx_graphs import copy_graph, lazy_module
from graphpasses.errors import PipelineError
from graphpasses.fusion.adversarial import find_difference
from graphpasses.fusion.exact_operators import has_fixed_sizes, is_exact, run_exactly, sizes_of
from graphpasses.fusion.kept import keep, read_kept
from graphpasses.fusion.list_updates import UPDATES, UpdateKernels, Updates
from graphpasses.fusion.measured import exact_functions, functions_in
from graphpasses.fusion.regions import is_large, is_only_view, marked_regions
from graphpasses.graph.nodes import freeze, named_call
from graphpasses.progress import stage, stages_shown

_COMPILES = threading.Lock()  # Inductor's settings are the process's


@dataclass(frozen=True)
class Calls:
    """What a region does, apart from the graph: calls on numbered values, of which the inputs are the first."""

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]  # what it computes and others read, themselves or views of it

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Calls:
        members = dict.fromkeys(nodes)
        inputs = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in members)
        made_by: dict[fx.Node, fx.Node] = {}
        outputs: dict[fx.Node, None] = {}
        for node in nodes:
            made_by[node] = made_by[node.all_input_nodes[0]] if is_only_view(node) else node
            if any(user not in members for user in node.users):
                outputs[made_by[node]] = None
        return cls(tuple(inputs), tuple(nodes), tuple(outputs))

    @property
    def columns(self) -> tuple[Calls, ...]:
        """What is compiled by itself; see :class:`Updates`, which has several."""
        return (self,)

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether all tensors have the sizes of the trace, whatever the step is given."""
        values = pytree.tree_leaves([node.meta["val"] for node in (*self.inputs, *self.nodes)])
        return all(isinstance(each, torch.Tensor) and has_fixed_sizes(each) for each in values)

    def at(self, inputs: Sequence[Any]) -> Calls:
        """Returns the same calls for inputs of known sizes."""

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(tensors)
            return self.run_eagerly(*(next(rest) if isinstance(each, torch.Tensor) else each for each in inputs))

        graph = trace_exactly(run, [each for each in inputs if isinstance(each, torch.Tensor)]).graph
        nodes = tuple(node for node in graph.nodes if node.op == "call_function")
        outputs: Any = graph.output_node().args[0]
        return Calls(tuple(graph.find_nodes(op="placeholder")), nodes, tuple(outputs))

    def key(self) -> Hashable:
        """Returns what regions have in common that compute the same on tensors of the same sizes."""
        number = {node: index for index, node in enumerate((*self.inputs, *self.nodes))}
        numbered = partial(fx.node.map_arg, fn=lambda node: ("value", number[node]))
        calls = [(str(node.target), freeze(numbered((node.args, node.kwargs)))) for node in self.nodes]
        layouts = map(layout_of, (*self.inputs, *self.outputs))
        return *calls, *layouts, tuple(number[node] for node in self.outputs)

    def compile(self) -> Kernel:
        return compile_exactly(self.run_exactly, [node.meta["val"] for node in self.inputs])

    def find_difference(self, kernels: Mapping[Hashable, Kernel]) -> str:
        """Returns how its kernel differs from eager's operators on all kinds of numbers, or nothing."""
        return find_difference(kernels[self.key()], self.run_eagerly, [node.meta["val"] for node in self.inputs])

    def run(self, call: Callable[[fx.Node, Any, Any], Any], *inputs: Any) -> list[Any]:
        """Runs the calls on tensors, each as ``call`` says."""
        values = dict(zip(self.inputs, inputs, strict=True))
        for node in self.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = call(node, args, kwargs)
        return [values[node] for node in self.outputs]

    def run_eagerly(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return self.run(lambda node, args, kwargs: node.target(*args, **kwargs), *inputs)  # type: ignore[operator]

    def run_exactly(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Runs what is compiled; each result lies in memory as eager's does."""
        results = self.run(lambda node, args, kwargs: run_exactly(node.target, args, kwargs), *inputs)
        return [_laid_out(result, node.meta["val"]) for result, node in zip(results, self.outputs, strict=True)]


def layout_of(node: fx.Node) -> Hashable:
    """Returns a tensor's device, dtype, sizes and strides; a size is itself."""
    value = node.meta["val"]
    return (value.device, value.dtype, *sizes_of(value)) if isinstance(value, torch.Tensor) else str(value)


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the strides of another, which has no gaps."""
    if value.stride() == like.stride():
        return value
    strides = like.stride()
    dims = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    back = [dims.index(dim) for dim in range(len(dims))]
    return value.permute(dims).clone(memory_format=torch.contiguous_format).permute(back)


class CompiledRegion(nn.Module):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._kernel([*inputs])


_MAX_SIZES = 8


class VaryingRegion(nn.Module):
    """A region whose tensors have sizes that vary: its kernels are of those that came twice in a row.

    With any other sizes it runs eager's operators, which have the same bits.
    """

    def __init__(self, calls: Calls, kernels: dict[Hashable, Kernel]) -> None:
        super().__init__()
        self._calls, self._all = calls, kernels
        self._own: dict[Hashable, Kernel | None] = {}
        self._last: Hashable = None

    def forward(self, *inputs: Any) -> Any:
        sizes = tuple((each.shape, each.stride()) if isinstance(each, torch.Tensor) else each for each in inputs)
        if sizes == self._last and sizes not in self._own and len(self._own) < _MAX_SIZES:
            self._own[sizes] = self._compile(inputs)
        self._last = sizes
        if (kernel := self._own.get(sizes)) is None:
            return self._calls.run_eagerly(*inputs)
        return kernel([each for each in inputs if isinstance(each, torch.Tensor)])

    def _compile(self, inputs: Sequence[Any]) -> Kernel | None:
        """Returns a kernel; None where one of these sizes is not exact, or too small."""
        calls = self._calls.at(inputs)
        measured = functions_in(calls.nodes)  # of this region, so they are exact here
        if not is_large(calls.nodes) or not all(is_only_view(n) or is_exact(n, measured) for n in calls.nodes):
            return None
        _compile([calls], self._all)
        return self._all[calls.key()]


@dataclass(frozen=True)
class CompiledRegions:
    """Makes the module that runs of one whose nodes are marked, see :func:`compile_regions`."""

    kernels: dict[Hashable, Kernel]
    axiom = "exact kernels"  # for what a proof takes it

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        return compile_regions(module, self.kernels)


def compile_regions(module: fx.GraphModule, kernels: dict[Hashable, Kernel]) -> fx.GraphModule:
    """Returns a module that runs each marked region as one kernel; adds those it compiles to ``kernels``.

    Raises PipelineError where a region does not stand together any more, has a call that is not exact, or a kernel
    with other bits than eager's.
    """
    marked = marked_regions(module.graph)
    if not marked:
        return module
    _check_exact(marked)
    regions = [*map(what_runs, marked)]
    _compile([each for each in regions if each.has_fixed_sizes], kernels)
    graph = copy_graph(module.graph)
    copies = dict(zip(module.graph.nodes, graph.nodes, strict=True))
    root: dict[str, Any] = {}
    for index, calls in enumerate(regions):
        _check_place(calls)
        if isinstance(calls, Updates):
            root[f"region_{index}"] = UpdateKernels(calls, kernels)
        elif not calls.has_fixed_sizes:
            root[f"region_{index}"] = VaryingRegion(calls, kernels)
        else:
            root[f"region_{index}"] = CompiledRegion(kernels[calls.key()])
        _replace(graph, calls, copies, f"region_{index}")
    for node in graph.find_nodes(op="get_attr"):
        root[str(node.target)] = getattr(module, str(node.target))
    return lazy_module(root, graph)


def _compile(regions: Sequence[Calls | Updates], kernels: dict[Hashable, Kernel]) -> None:
    """Adds the kernels of regions that are not there yet."""
    parts = [part for calls in regions for part in calls.columns]
    missing = {key: part for part in parts if (key := part.key()) not in kernels}
    if not missing:
        return
    with stages_shown():
        for index, (key, part) in enumerate(missing.items(), start=1):
            stage(f"compiles kernel {index} of {len(missing)}")
            with _COMPILES:
                kernels[key] = part.compile()
        stage("runs kernels beside eager's operators")
        _check_bits(regions, kernels, set(missing))


def what_runs(nodes: tuple[fx.Node, ...]) -> Calls | Updates:
    return Updates.of(nodes) if nodes[0].target in UPDATES else Calls.of(nodes)


def _check_exact(regions: Sequence[tuple[fx.Node, ...]]) -> None:
    """Raises if a pass has marked what no rule says to be exact; updates run what they know alone."""
    regions = [nodes for nodes in regions if nodes[0].target not in UPDATES]
    measured = exact_functions(functions_in(node for nodes in regions for node in nodes))
    for nodes in regions:
        members = set(nodes)
        for node in nodes:
            is_view = is_only_view(node) and node.all_input_nodes[0] in members
            if not is_view and not is_exact(node, measured):
                raise PipelineError(
                    f"{node.name} is marked as part of an exact kernel, and is not: {named_call(node)}"
                )


def _check_place(calls: Calls | Updates) -> None:
    following = calls.nodes[0]
    for node in calls.nodes:
        if node is not following:
            raise PipelineError(
                f"{following.name} stands between calls of one kernel, {calls.nodes[0].name} to "
                f"{calls.nodes[-1].name}; let 'fuse-exactly' be the last pass of the pipeline"
            )
        following = node.next


def _replace(graph: fx.Graph, calls: Calls | Updates, copies: dict[fx.Node, fx.Node], name: str) -> None:
    nodes = [copies[node] for node in calls.nodes]
    with graph.inserting_before(nodes[0]):
        call = graph.call_module(name, tuple(copies[node] for node in calls.inputs))
        outputs = calls.outputs if isinstance(calls, Calls) else ()  # updates write
        parts = [graph.call_function(operator.getitem, (call, index)) for index in range(len(outputs))]
    for node, part in zip(outputs, parts, strict=True):
        part.meta["val"] = node.meta["val"]  # later passes read it
        copies[node].replace_all_uses_with(part)
        copies[node] = part
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)


def _check_bits(regions: Sequence[Calls | Updates], kernels: dict[Hashable, Kernel], compiled: set[Hashable]) -> None:
    """Raises if a kernel that was just compiled has other bits than eager's operators, and forgets all of those.

    On one machine it is asked once: what is equal is kept on disk.
    """
    known, equal = read_kept("exact_kernels"), dict[str, bool]()
    seen: set[Hashable] = set()
    for calls in regions:
        keys = tuple(part.key() for part in calls.columns)
        if keys in seen or compiled.isdisjoint(keys):
            continue
        seen.add(keys)
        names = [kernels[key].name for key in dict.fromkeys(keys)]
        name = sha256(str((torch.get_num_threads(), keys, names)).encode()).hexdigest()
        if name in known:
            continue
        if difference := calls.find_difference(kernels):
            for key in compiled:
                del kernels[key]
            raise PipelineError(
                f"a kernel of exact operators has other bits than eager's: {difference}; leave 'fuse-exactly' out, "
                f"and report the operators: {', '.join(map(named_call, calls.nodes))}"
            )
        if all(names):
            equal[name] = True
    if equal:
        keep("exact_kernels", equal)
