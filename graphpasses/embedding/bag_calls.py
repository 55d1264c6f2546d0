"""Calls of ``embedding_bag`` in a model's graph, and which of them FBGEMM's TBE can do."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from graphpasses._torch.module_hooks import have_hooks
from graphpasses._torch.symbols import expression
from graphpasses.embedding.arena import Arena
from graphpasses.embedding.fused_update import FusedForm, learning_rate, optimizer_states
from graphpasses.graph import DynamoGraph, InputKind

_SIGNATURE = inspect.signature(F.embedding_bag)

# Options of `embedding_bag` that TBE does not have, and the value that turns each off.
_OFF: dict[str, object] = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False, "padding_idx": None}


@dataclass(frozen=True)
class Kind:
    """What the calls of one lookup have in common."""

    form: FusedForm  # the fused update of their tables
    rate: float  # its learning rate
    arena: int | None  # id of the arena in which an earlier compilation put them; None for none
    mode: str
    is_weighted: bool
    include_last_offset: bool
    num_offsets: object  # number of offsets, or its symbolic expression


@dataclass(frozen=True)
class BagCall:
    """One call of ``embedding_bag`` that can become part of a lookup."""

    node: fx.Node
    fqn: str
    table: nn.Parameter  # the live one
    weight: fx.Node  # its placeholder
    ids: fx.Node  # node of the ids, 1-D, or 2-D with one bag per row
    offsets: fx.Node | None  # node of the offsets; None for 2-D ids
    weights: fx.Node | None  # node of the per-sample weights, shaped as the ids; or None
    kind: Kind  # calls of one kind can become one lookup


def read_bag_calls(graph: DynamoGraph) -> tuple[dict[fx.Node, BagCall], dict[str, str]]:
    """Returns the calls of ``embedding_bag`` that TBE can do, in order; and why each other table is left alone."""
    calls: dict[fx.Node, BagCall] = {}
    left_alone: dict[str, str] = {}
    inputs = dict(zip(graph.placeholders, zip(graph.inputs, graph.live, strict=True), strict=True))
    for node in graph.graph.find_nodes(op="call_function", target=torch.embedding_bag):
        left_alone[node.name] = "it is a call of torch.embedding_bag, not of torch.nn.functional.embedding_bag"
    for node in graph.graph.find_nodes(op="call_function", target=F.embedding_bag):
        bound = _SIGNATURE.bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        options = bound.arguments
        item, table = inputs.get(options["weight"], (None, None))
        if item is None or item.kind is not InputKind.PARAMETER:
            left_alone[node.name] = "its table is not a parameter of the model"
            continue
        assert isinstance(table, nn.Parameter)
        reason = _why_not_call(options) or _why_not_table(table)
        if reason is None:
            calls[node] = _bag_call(node, item.fqn, table, options)
        else:
            left_alone.setdefault(item.fqn, reason)
    owners: dict[int, str] = {}
    for call in calls.values():
        for user in call.weight.users:
            if user not in calls:
                left_alone.setdefault(call.fqn, f"{user.name} reads it, too")
        owner = owners.setdefault(call.table.untyped_storage().data_ptr(), call.fqn)
        if owner != call.fqn:
            left_alone.setdefault(call.fqn, f"it shares its memory with {owner}")
            left_alone.setdefault(owner, f"it shares its memory with {call.fqn}")
    return {node: call for node, call in calls.items() if call.fqn not in left_alone}, left_alone


def _why_not_call(options: dict[str, Any]) -> str | None:
    for option, value in _OFF.items():
        if options[option] != value:
            return f"TBE has no {option}={options[option]}"
    if options["mode"] == "max":
        return "TBE has no mode='max'"
    return None


def _why_not_table(table: nn.Parameter) -> str | None:
    if type(table) is not nn.Parameter:
        return f"it is a {type(table).__name__}"
    if table.device.type != "cpu" or table.dtype != torch.float32:
        return f"it is {table.dtype} on {table.device}, and only torch.float32 on cpu is lowered"
    if table.numel() == 0:
        return "it is empty"
    if not table.requires_grad:
        return "it is frozen"
    form = FusedForm.of(table)
    if isinstance(form, str):
        return form
    if have_hooks([table]):
        return "hooks watch its gradient, which a fused update does not make"
    return next(filter(None, map(Arena.reject_reason, (table, *optimizer_states(table, form)))), None)


def _bag_call(node: fx.Node, fqn: str, table: nn.Parameter, options: dict[str, Any]) -> BagCall:
    form, arena = FusedForm.of(table), Arena.containing(table)
    ids, offsets, weights = (options[name] for name in ("input", "offsets", "per_sample_weights"))
    assert isinstance(form, FusedForm)
    kind = Kind(
        form=form,
        rate=learning_rate(table),
        arena=None if arena is None else id(arena),
        mode=options["mode"],
        is_weighted=weights is not None,
        include_last_offset=offsets is not None and options["include_last_offset"],
        num_offsets=expression((ids if offsets is None else offsets).meta["val"].size(0)),
    )
    return BagCall(node, fqn, table, options["weight"], ids, offsets, weights, kind)
