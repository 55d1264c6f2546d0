"""FBGEMM's update of a table's rows by what was looked up of them, which makes no gradient of the table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from graphpasses.ops.define import define_operator

# FBGEMM's `EmbeddingLocation.HOST`.
_HOST = 3


def update_rows(
    table: Tensor,
    sums: Tensor | None,
    step: Tensor | None,
    gradients: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    form: str,
    eps: float,
    pooling: int,
    has_last_offset: bool,
    rate: float,
) -> None:
    """Updates a table in place as an optimizer would by the dense gradient of all its lookups, up to rounding.

    ``sums`` and ``step`` are the optimizer's state, None for ``"sgd"``. Each lookup has the gradient of its bags, [B,
    D]; its ids; where in them each bag begins, None if each id is a bag; and the weights of its ids, None for ones.
    ``form`` is ``"sgd"``, ``"adagrad"`` or ``"rowwise_adagrad"``; ``pooling`` is 0 for sums, 1 for means.
    """
    num_rows, dim = table.shape
    all_ids = _joined([each.reshape(-1) for each in ids]).long()
    if len(ids) == 1 and has_last_offset and offsets[0] is not None:
        all_offsets = offsets[0].long()
    else:
        ends = [_ends(*each, has_last_offset) for each in zip(ids, offsets, strict=True)]
        starts = accumulate((each.numel() for each in ids), initial=0)
        all_offsets = torch.cat(
            [all_ids.new_zeros(1), *(end + start for end, start in zip(ends, starts, strict=False))]
        )
    given = [
        torch.ones(each.numel(), device="cpu") if weight is None else weight.reshape(-1)
        for each, weight in zip(ids, weights, strict=True)
        if any(other is not None for other in weights)
    ]
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    placement = torch.full((1,), _HOST, dtype=torch.int32, device="cpu")
    common = (
        _joined([gradient.reshape(-1, dim) for gradient in gradients]).contiguous(),
        table.view(-1),
        placement,
        zero,
        torch.tensor([0, dim], dtype=torch.int32, device="cpu"),
        dim,
        torch.tensor([0, num_rows], device="cpu"),
        num_rows.bit_length(),
        all_ids,
        all_offsets,
        pooling,
        _joined(given) if given else table.new_empty(0),
        False,
    )
    learning_rate = torch.tensor(rate, dtype=torch.float32, device="cpu")
    fbgemm = torch.ops.fbgemm
    if form == "sgd":
        fbgemm.split_embedding_backward_codegen_sgd_cpu(*common, learning_rate)
        return
    assert sums is not None
    assert step is not None
    update = getattr(fbgemm, f"split_embedding_backward_codegen_{form}_cpu")
    update(*common, sums.view(-1), placement, zero, learning_rate, eps)
    step.add_(1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _ends(ids: Tensor, offsets: Tensor | None, has_last_offset: bool) -> Tensor:
    """Returns where each bag ends."""
    if offsets is None:
        return torch.arange(1, ids.numel() + 1, device="cpu")
    if has_last_offset:
        return offsets[1:].long()
    return torch.cat([offsets[1:].long(), torch.tensor([ids.numel()], device="cpu")])


UPDATE_ROWS = define_operator(
    "update_rows(Tensor(a!) table, Tensor(b!)? sums, Tensor(c!)? step, Tensor[] gradients, Tensor[] ids, "
    "Tensor?[] offsets, Tensor?[] weights, str form, float eps, int pooling, bool has_last_offset, Scalar rate) "
    "-> ()",
    update_rows,
    fake=lambda *_: None,
)
