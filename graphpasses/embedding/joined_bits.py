"""Whether lookups that become one have the same bits, asked of the device itself: a GPU chooses kernels by sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, random

from graphpasses.embedding.emit_lookup import arguments_like
from graphpasses.fbgemm.lookups import LookupCall, TableLayout
from graphpasses.fbgemm.names import complete_cumsum
from graphpasses.identity import same_bits
from graphpasses.ops.join_lookups import JOIN_BAGS, SPLIT_FEATURES

# Rows of a table: each is looked up so often that its gradients are added by several threads.
_NUM_ROWS, _NUM_SAMPLES, _MAX_LENGTH = 5, 128, 7


def find_difference(calls: Sequence[LookupCall]) -> str:
    """Returns how lookups, joined, differ from themselves apart: in results or in updates; or nothing.

    Small tables with the dims, dtypes and settings of theirs are looked up and updated on their device, both ways.
    """
    generator, device = torch.Generator().manual_seed(0), calls[0].device
    layouts = [_small(call) for call in calls]
    tables = [_states(call, layout, generator) for call, layout in zip(calls, layouts, strict=True)]
    bags = [_bags(call, generator) for call in calls]
    starts = [[0, *accumulate(state.numel() for state in states)][:-1] for states in zip(*tables, strict=True)]
    layout, states = TableLayout.join(layouts, *starts), [torch.cat(parts) for parts in zip(*tables, strict=True)]
    parts = [(call.arguments["total_D"], each["indices"].numel()) for call, each in zip(calls, bags, strict=True)]
    try:
        with random.fork_rng([device] if device.type != "cpu" else []):  # half precision is rounded at random
            apart = [_trained(*each) for each in zip(calls, layouts, tables, bags, strict=True)]
            joined = _trained(calls[0], layout, states, _joined(calls, bags), parts)
    except RuntimeError as error:
        return f"FBGEMM does not look them up by one call on {device}: {str(error).splitlines()[0]}"
    together = [torch.cat([each.flatten() for each in parts]) for parts in zip(*apart, strict=True)]
    names = ("results", "tables", "states of the optimizer")
    differing = [
        f"{name} ({int((a != b).sum())} of {a.numel()} elements)"
        for name, a, b in zip(names, together, joined, strict=False)
        if not same_bits(a, b)
    ]
    return f"one call has other bits on {device}: {', '.join(differing)}" if differing else ""


def _small(call: LookupCall) -> TableLayout:
    """Returns a layout of as many tables, of few rows, which the same features read."""
    layout = call.layout()
    number = {first: index for index, first in enumerate(dict.fromkeys(layout.first_rows))}
    places = [number[first] for first in layout.first_rows]
    rows = [_NUM_ROWS * index for index in range(len(number))]
    starts = [0, *accumulate(dim * _NUM_ROWS for dim in _dims(layout))]
    of_states = starts if call.optimizer == "adagrad" else rows
    return replace(
        layout,
        first_rows=tuple(rows[place] for place in places),
        num_rows=_NUM_ROWS * len(number),
        weights_offsets=tuple(starts[place] for place in places),
        momentum1_offsets=tuple(of_states[place] for place in places) if layout.momentum1_offsets else (),
    )


def _dims(layout: TableLayout) -> list[int]:
    """Returns the embedding dimension of each table."""
    return [*dict(zip(layout.first_rows, layout.dims, strict=True)).values()]


def _states(call: LookupCall, layout: TableLayout, generator: torch.Generator) -> list[Tensor]:
    num_elements = sum(_dims(layout)) * _NUM_ROWS
    sizes = (num_elements, num_elements if call.optimizer == "adagrad" else layout.num_rows)
    live = call.state_tensors
    return [
        torch.rand(size, generator=generator, device="cpu").to(each.device, each.dtype)
        for size, each in zip(sizes, live, strict=False)
    ]


def _bags(call: LookupCall, generator: torch.Generator) -> dict[str, Any]:
    num_bags = call.num_features * _NUM_SAMPLES
    lengths = torch.randint(0, _MAX_LENGTH + 1, (num_bags,), generator=generator, device="cpu")
    ids = torch.randint(0, _NUM_ROWS, (int(lengths.sum()),), generator=generator, device="cpu")
    is_weighted = call.arguments["indice_weights"] is not None
    weights = torch.rand(ids.numel(), generator=generator, device="cpu").to(call.device) if is_weighted else None
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return {"indices": ids.to(call.device), "offsets": offsets.to(call.device), "indice_weights": weights}


def _joined(calls: Sequence[LookupCall], bags: Sequence[dict[str, Any]]) -> dict[str, Any]:
    indices, offsets, weights = ([each[key] for each in bags] for key in bags[0])
    ids, lengths = JOIN_BAGS(indices, offsets, [call.num_features for call in calls], [call.module for call in calls])
    joint_weights = None if weights[0] is None else torch.cat(weights)
    return {
        "indices": ids,
        "offsets": complete_cumsum()(lengths.flatten()),
        "indice_weights": joint_weights,
    }


def _trained(
    call: LookupCall,
    layout: TableLayout,
    states: Sequence[Tensor],
    bags: dict[str, Any],
    parts: Sequence[tuple[int, int]] = (),
) -> list[Tensor]:
    """Returns results, tables and states of one step with a lookup like ``call``.

    ``parts`` are of each of several lookups in it the columns and the ids.
    """
    own = [state.clone() for state in states]
    arguments = arguments_like(call, layout, own, lambda value, key: value) | bags
    arguments = {key: fx.node.map_arg(value, call.inputs.get) for key, value in arguments.items()}
    arguments["placeholder_autograd_tensor"] = torch.zeros(0, device=call.device, requires_grad=True)
    columns, ids = ([*each] for each in zip(*parts, strict=True)) if parts else ([], [])
    with torch.enable_grad():
        result = call.node.target(**arguments)  # type: ignore[operator]
        outputs = [result]
        if parts:
            sizes = [_NUM_SAMPLES] * len(parts)
            outputs = SPLIT_FEATURES(result, columns, sizes) if call.is_pooled else result.split(ids)
        torch.autograd.backward(outputs, [_gradient(each) for each in outputs])
    return [torch.cat([each.detach().flatten() for each in outputs]), *own]


def _gradient(output: Tensor) -> Tensor:
    repeated = torch.linspace(-1, 1, 61, device=output.device).repeat(output.numel() // 61 + 1)
    return repeated[: output.numel()].view_as(output).to(output.dtype)
