"""Fuse operators into one kernel where every bit of what they compute is fixed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from graphpasses._torch import pytree
from graphpasses._torch.symbols import example_size
from graphpasses.agreement import CollectiveSequence, Question
from graphpasses.analysis.dependencies import place_nodes
from graphpasses.analysis.effects import written_memory
from graphpasses.fusion.compiled_regions import CompiledRegions, layout_of, what_runs
from graphpasses.fusion.exact_operators import Function, is_exact, is_widening, measured_functions
from graphpasses.fusion.measured import exact_functions, functions_in
from graphpasses.fusion.regions import Region, functional_target, is_only_view, plan_regions
from graphpasses.graph import Stage, TrainGraph
from graphpasses.graph.nodes import EXACT_REGION, storages
from graphpasses.passes.runner import GraphPass, Numerics


def _make_functional(graph: TrainGraph) -> None:
    """Lets operators make anew what they wrote into memory that nobody else reads."""
    for node in [*graph.graph.nodes]:
        if node.op == "call_function" and (target := functional_target(node)) is not node.target:
            with graph.graph.inserting_before(node.next):
                new = graph.emit(target, node.args, node.kwargs, like=node)  # type: ignore[arg-type]
            if is_exact(new) and layout_of(new) == layout_of(node):
                graph.merge(node, new)
            else:
                graph.graph.erase_node(new)


def _measured(graph: TrainGraph) -> frozenset[Function]:
    """Returns the functions in a graph whose kernels have eager's bits on the machines of all ranks.

    Ranks agree on those of a joint graph's halves while they have the joint one: each may compile backward later.
    """
    agreed: dict[Function, bool] = graph.remembered.setdefault(_EXACT_ON_ALL, {})
    own = functions_in(graph.graph.nodes)
    exact = exact_functions(own)
    if graph.stage in (Stage.STEP, Stage.JOINT):
        functions = measured_functions()
        flags = [each not in own or each in exact for each in functions]
        flags = CollectiveSequence(graph).agree(_EXACT_ON_ALL, flags)
        agreed.update(zip(functions, flags, strict=True))
    return frozenset(each for each in exact if agreed.get(each))


def _on_all(flags_by_rank: list[list[bool]]) -> list[bool]:
    return [*map(all, zip(*flags_by_rank, strict=True))]


# A rank that knows less than what was agreed fuses less: its collectives stay as they are.
_EXACT_ON_ALL = Question("fuse-exactly", "functions that are exact", _on_all, lambda agreed, own: "")


def _widen_where_read(graph: TrainGraph, regions: tuple[Region, ...]) -> bool:
    """Lets regions widen values themselves that only regions read; returns whether one does.

    Then what is kept from forward to backward is the narrow value.
    """
    of = {node: region for region in regions for node in region}
    written = written_memory(graph.graph)
    found = False
    for node in [*graph.graph.nodes]:
        if not is_widening(node) or not all(user in of for user in node.users):
            continue
        source, own = node.all_input_nodes[0], of.get(node)
        readers = {region for user in node.users if (region := of[user]) is not own}
        if len(readers) < 2 - (own is not None) or storages(source) & written:
            continue
        for region in sorted(readers):
            users = [user for user in node.users if of[user] is region]
            with graph.graph.inserting_before(min(users)):
                copy = graph.emit_copy(node, {})
            for key in ("autograd_backward", "seq_nr"):
                copy.meta.pop(key, None)
                copy.meta.update({key: users[0].meta[key]} if key in users[0].meta else {})
            for user in users:
                user.replace_input_with(node, copy)
        found = True
    return found


def _bytes(*nodes: fx.Node) -> int:
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(example_size(value.numel())[0] * value.dtype.itemsize for value in tensors)


def _report(graph: fx.Graph, regions: tuple[Region, ...]) -> str:
    computing = [node for node in graph.nodes if node.op == "call_function" and not is_only_view(node)]
    moved = {node: _bytes(*node.all_input_nodes, node) for node in computing}
    fused = [node for region in regions for node in region if node in moved]
    calls = [what_runs(region) for region in regions]
    before = sum(moved[node] for node in fused)
    kernels = [part for each in calls for part in each.columns]
    after = sum(_bytes(*each.inputs, *each.outputs) for each in calls)
    share = before / max(sum(moved.values()), 1)
    return (
        f"{len(fused)} of {len(computing)} operators run as {len(kernels)} kernels, of which "
        f"{len({each.key() for each in kernels})} differ; they move {after / 1e6:.1f} MB instead of "
        f"{before / 1e6:.1f}, {share:.0%} of what all operators moved"
    )


@dataclass(frozen=True)
class FuseExactly(GraphPass):
    """Marks groups of operators that then run as one kernel each, compiled by Inductor.

    Only operators whose bits are fixed are fused: sums, products, quotients, casts, comparisons, selects and
    copies, as IEEE 754 has them, and functions of half precision such as SiLU, where they have eager's bits for all
    65,536 values on all ranks. Each rounds as eager's does, half precision after every operator. What is reduced,
    multiplied as matrices, normalized or drawn stays eager's kernel. Updates of lists of parameters that follow each
    other are one kernel for each parameter. The operators of a group come to stand together; one that wrote into
    memory of which nobody else knows makes its result anew::

          weight = parameter('weight')  # bf16[64, 64]
          x = batch('x')  # bf16[64, 64]
        + y = aten.mm(x, weight)  # bf16[64, 64]
          half = aten.mul(x, 0.5)  # bf16[64, 64]
        - y = aten.mm(x, weight)  # bf16[64, 64]
          more = aten.add(half, x)  # bf16[64, 64]
          z = aten.add(y, more)  # bf16[64, 64]
        - z_1 = aten.add_(z, more)  # bf16[64, 64]
        - loss = aten.sum(z_1)  # bf16[]
        + add = aten.add(z, more)  # bf16[64, 64]
        + loss = aten.sum(add)  # bf16[]
          return loss  # loss

    The graph keeps its operators, for the proof. When the step is first called, each group is compiled, and run
    beside eager's operators on all kinds of numbers; one other bit raises :class:`~graphpasses.errors.PipelineError`.
    Source: IEEE 754-2019, 5.4.1 and 5.6; ATen computes half precision in float32 (``at::opmath_type``).

    Example:
        >>> model = nn.Linear(64, 64)
        >>> step = graphpasses.capture_train_step(
        ...     lambda model, x: (model(x) * 2 + 1).square().mean(), model, torch.ones(64, 64)
        ... )
        >>> graphpasses.Pipeline((FuseExactly(),)).run(step).report.passes[0].num_rewrites
        2
    """

    name = "fuse-exactly"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.STEP, Stage.JOINT, Stage.FORWARD, Stage.BACKWARD})
    runs_after = frozenset({
        "deduplicate-shared", "coalesce-grad-reductions", "bucket-fsdp-collectives", "canonical-reductions",
        "reshard-after-forward", "prefetch-collectives", "schedule-collectives", "fuse-table-updates",
        "update-in-backward", "overlap-all-to-all", "reinplace-tbe-updates",
    })  # fmt: skip

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place, but for a joint one, whose halves are; returns the number of kernels."""
        if graph.stage is Stage.JOINT:
            _measured(graph)
            return 0
        _make_functional(graph)
        measured = _measured(graph)
        plan = plan_regions(graph.graph, measured)
        if _widen_where_read(graph, plan.regions):
            plan = plan_regions(graph.graph, measured)
        place_nodes(graph.graph, plan.order)
        for number, region in enumerate(plan.regions):
            for node in region:
                node.meta[EXACT_REGION] = number
        if plan.regions:
            graph.runs_as = CompiledRegions(graph.remembered.setdefault(EXACT_REGION, {}))
            graph.note(_report(graph.graph, plan.regions))
        return len(plan.regions)
