"""Tables of a captured step are updated by what was looked up of them; no gradient of a whole table is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpasses._torch.schemas import named_arguments
from graphpasses.embedding.fused_update import FusedForm
from graphpasses.fbgemm.names import load_fbgemm
from graphpasses.graph import GraphInput, InputKind, Stage, TrainGraph
from graphpasses.graph.nodes import last_reads
from graphpasses.graph.train_graph import add_update_input
from graphpasses.graph.update import Update
from graphpasses.ops.update_rows import UPDATE_ROWS
from graphpasses.passes.runner import GraphPass, Numerics

aten = torch.ops.aten
_OF_BAGS, _OF_ROWS = aten._embedding_bag_backward.default, aten.embedding_dense_backward.default
_SUM, _MEAN = 0, 1
# Options of a lookup that FBGEMM's update has not, and the value that turns each off.
_OFF = {"scale_grad_by_freq": False, "sparse": False, "padding_idx": -1}


@dataclass(frozen=True)
class Lookup:
    """What the gradient of one lookup of a table is made of."""

    node: fx.Node  # the call that makes the table's dense gradient of it
    gradient: fx.Node  # of the bags, [B, D]
    ids: fx.Node  # its ids
    offsets: fx.Node | None  # where each bag begins; None if each id is a bag
    weights: fx.Node | None  # of the ids; None for ones
    # How bags are pooled, and whether offsets have the end, too: all lookups of a table must be alike.
    kind: tuple[int, bool]


@dataclass(frozen=True)
class TableUpdate:
    """What becomes of a table's update."""

    fqn: str  # canonical FQN of the table
    table: fx.Node  # its placeholder
    slot: int  # position of its gradient among the outputs
    lookups: tuple[Lookup, ...]  # of it
    sums: tuple[fx.Node, ...]  # calls that add their gradients
    form: FusedForm  # the fused update
    group: int
    anchor: fx.Node  # the call after which nothing reads the table any more


def _gradient_calls(total: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Returns the calls whose results are added to a gradient, and those that add; None if it is made otherwise."""
    leaves: list[fx.Node] = []
    sums: list[fx.Node] = []
    pending: list[Any] = [total]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node):
            return None
        if node.target in (_OF_BAGS, _OF_ROWS):
            leaves.append(node)
        elif node.target == aten.add.Tensor and not node.kwargs and len(node.args) == 2:
            sums.append(node)
            pending.extend(reversed(node.args))
        else:
            return None
    return leaves[::-1], sums


def _read_lookup(node: fx.Node) -> Lookup | str:
    """Returns a lookup; where FBGEMM's update does not do the same, why."""
    arguments = named_arguments(node)
    if node.target == _OF_ROWS:
        arguments["grad"] = arguments["grad_output"]
    for option, value in _OFF.items():
        if arguments.get(option, value) != value:
            return f"a lookup has {option}={arguments[option]}"
    mode = arguments.get("mode", _SUM)
    if mode not in (_SUM, _MEAN):
        return "a lookup takes the largest of each bag"
    has_end = False
    if node.target == _OF_BAGS:
        lookup = arguments["offset2bag"].args[0]
        if getattr(lookup, "target", None) != aten._embedding_bag.default:
            return "a lookup of its gradient is not found"
        has_end = bool(named_arguments(lookup).get("include_last_offset", False))
    return Lookup(
        node,
        arguments["grad"],
        arguments["indices"],
        arguments.get("offsets"),
        arguments.get("per_sample_weights"),
        (mode, has_end),
    )


def _plan(graph: TrainGraph, update: Update) -> tuple[list[TableUpdate], dict[str, str]]:
    """Returns the tables whose updates are fused, and why others, that are looked up, are not."""
    plans: list[TableUpdate] = []
    left_alone: dict[str, str] = {}
    placeholders: dict[str, list[fx.Node]] = {}
    for fqn, node in graph.parameter_placeholders():
        placeholders.setdefault(fqn, []).append(node)
    gradients = graph.gradients()
    for fqn in update.gradients:
        if len(found := gradients.get(fqn, {})) != 1:
            continue
        ((slot, gradient),) = found.items()
        if (calls := _gradient_calls(gradient)) is None:
            continue
        made = _plan_table(update, fqn, placeholders[fqn], slot, calls)
        if isinstance(made, str):
            left_alone[fqn] = made
        else:
            plans.append(made)
    return plans, left_alone


def _plan_table(
    update: Update, fqn: str, placeholders: list[fx.Node], slot: int, calls: tuple[list[fx.Node], list[fx.Node]]
) -> TableUpdate | str:
    leaves, sums = calls
    if update.clip_norm is not None:
        return "clipping needs its gradient"
    if len(placeholders) > 1:
        return "it is read under several names; run deduplicate-shared"
    (table,) = placeholders
    value: torch.Tensor = table.meta["val"]
    if value.device.type != "cpu" or value.dtype != torch.float32:
        return f"it is {value.dtype} on {value.device}, and only torch.float32 on cpu is fused"
    if not value.is_contiguous():
        return "it is not contiguous"
    group = next(index for index, names in enumerate(update.facts.groups) if fqn in names)
    optimizer, options = update.optimizers.groups[group]
    form = FusedForm.of_options(type(optimizer), options)
    if isinstance(form, str):
        return form
    if isinstance(options["lr"], torch.Tensor):
        return "its learning rate is a tensor"
    if any(len(node.users) != 1 for node in (*leaves, *sums)):
        return "its gradient is read otherwise, too"
    lookups: list[Lookup] = []
    for node in leaves:
        lookup = _read_lookup(node)
        if isinstance(lookup, str):
            return lookup
        lookups.append(lookup)
    if len({lookup.kind for lookup in lookups}) > 1:
        return "its lookups pool otherwise, or one has the end in its offsets"
    anchor = max([*leaves, *last_reads(table)])
    return TableUpdate(fqn, table, slot, tuple(lookups), tuple(sums), form, group, anchor)


def _apply(graph: TrainGraph, update: Update, plans: list[TableUpdate]) -> None:
    nodes = dict(zip(update.inputs, update.module.graph.find_nodes(op="placeholder"), strict=True))
    rates: dict[int, fx.Node] = {}

    def add(item: GraphInput) -> fx.Node:
        return add_update_input(graph, item, nodes[item])

    for plan in plans:
        states = [add(GraphInput(InputKind.OPTIMIZER_STATE, plan.fqn, state=name)) for name in plan.form.states]
        if plan.group not in rates:
            rates[plan.group] = add(GraphInput(InputKind.HYPERPARAMETER, f"group {plan.group}", state="lr"))
        mode, has_end = plan.lookups[0].kind
        arguments = (
            plan.table,
            *(states or (None, None)),
            [lookup.gradient for lookup in plan.lookups],
            [lookup.ids for lookup in plan.lookups],
            [lookup.offsets for lookup in plan.lookups],
            [lookup.weights for lookup in plan.lookups],
            plan.form.name,
            plan.form.eps,
            mode,
            has_end,
            rates[plan.group],
        )
        with graph.graph.inserting_before(plan.anchor.next):
            graph.emit(UPDATE_ROWS, arguments, like=plan.lookups[0].node)
        graph.set_output(plan.slot, None)
        for node in (*plan.sums, *(lookup.node for lookup in plan.lookups)):  # a sum before what it adds
            graph.graph.erase_node(node)
    graph.note_updates([plan.fqn for plan in plans])


@dataclass(frozen=True)
class FuseTableUpdates(GraphPass):
    """Makes one fused update of a table's gradient and of what the optimizer does with it.

    FBGEMM's update reads and writes the rows that were looked up, where the optimizer reads the whole gradient::

          weight = parameter('weight')  # f32[10, 2]
          batch_0 = batch('batch[0]')  # i64[3]
        + lr_of_group_0 = hyperparameter('group 0', 'lr')  # zuf0
          embedding = aten.embedding(weight, batch_0)  # f32[3, 2]
          sum = aten.sum(embedding)  # f32[]
          ones_like = aten.ones_like(sum, pin_memory=False, memory_format=torch.preserve_format)  # f32[]
          # backward
          expand = aten.expand(ones_like, [3, 2])  # f32[3, 2]
        - embedding_dense_backward = aten.embedding_dense_backward(expand, batch_0, 10, -1, False)  # f32[10, 2]
        - return sum, embedding_dense_backward  # loss, gradient of weight
        + update_rows = graphpasses.update_rows(weight, [expand], [batch_0], lr_of_group_0, ...)
        + return sum, None  # loss, gradient of weight

    It fuses tables that are looked up by ``embedding_bag`` (summed, weighted or not, or averaged) and ``embedding``,
    and that the step's optimizer updates: SGD, Adagrad or RowWiseAdagrad without momentum, weight decay and the like.
    Several lookups of a table stay one update of their sum. The optimizer stays the user's: the update reads its
    rate, and writes its state. It rounds otherwise: rows add up the gradients of their ids in another order.

    Left alone and noted are tables that are not float32 on the CPU; lookups with ``padding_idx``,
    ``scale_grad_by_freq`` or ``mode="max"``; tables whose gradient is clipped, or read otherwise, too; and optimizers
    without a fused form. A step in which the optimizer has to make its state runs as it was captured.

    Raises:
        CaptureError: a table is fused, and FBGEMM is not there.

    Example:
        >>> bags = nn.EmbeddingBag(10, 4, mode="sum")
        >>> optimizer = torch.optim.SGD(bags.parameters(), lr=0.1)
        >>> step = graphpasses.capture_train_step(
        ...     lambda model, ids: model(ids).sum(), bags, torch.tensor([[1, 2]]), optimizer=optimizer
        ... )
        >>> step = graphpasses.Pipeline((FuseTableUpdates(),)).run(step)
        >>> loss = step(torch.tensor([[1, 2]]))  # which updates rows 1 and 2
        >>> step.report.passes[0].num_rewrites
        1
    """

    name = "fuse-table-updates"
    numerics = Numerics.ROUNDING
    stages = frozenset({Stage.STEP})

    def rewrite(self, graph: TrainGraph) -> int:
        """Rewrites ``graph`` in place; returns the number of tables whose updates were fused."""
        update = graph.update
        if update is None:
            graph.note("no table is updated: the step was captured without optimizer=")
            return 0
        if update.is_in_step:
            return 0
        plans, left_alone = _plan(graph, update)
        for fqn, reason in left_alone.items():
            graph.note(f"{fqn} is updated by its dense gradient: {reason}")
        if not plans:
            return 0
        load_fbgemm()
        without = graph.copy().module
        fqns = [plan.fqn for plan in plans]
        _apply(graph, update, plans)
        graph.update = update.without(fqns, without, {plan.group for plan in plans})
        return len(plans)
