"""Pooled embeddings side by side: few copies, eager's bits; what has another batch, or may not, is packed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("torchrec")
import tests.helpers.recommenders  # noqa: F401  loads TorchRec's operators without its warnings  # isort: skip
from graphpasses.errors import AgreementError
from graphpasses.graph import ALL_TO_ALL, InputKind, Stage, TrainGraph
from graphpasses.ops.join_lookups import JOIN_FEATURES, SPLIT_FEATURES
from graphpasses.ops.pack_all_to_all import PACK
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import BucketAllToAll, BucketPooledAllToAll
from graphpasses.passes.runner import Pipeline
from tests.helpers.all_to_alls import Step, capture, exchange
from tests.helpers.models import same_bits

aten = torch.ops.aten
TO_COLUMNS = torch.ops.torchrec._split_1d_cat_2d.default
FROM_COLUMNS = torch.ops.torchrec._split_1d_cat_2d_backward_impl.default
ROWS = (3, 2)  # samples of each rank's batch
WIDTHS = ((4, 0), (0, 2), (3, 5))  # of each module, columns of each rank's tables


def forward(tables: Tensor, widths: Sequence[int], rows: Sequence[int] = ROWS) -> Tensor:
    """Sends a module's embeddings of all samples; returns its columns of this rank's."""
    rank = dist.get_rank()
    received = exchange(
        tables.view(-1), [rows[rank] * width for width in widths], [size * widths[rank] for size in rows]
    )
    return TO_COLUMNS(received, rows[rank], list(widths))


def backward(columns: Tensor, widths: Sequence[int], rows: Sequence[int] = ROWS) -> Tensor:
    """Sends the gradient of a module's columns; returns that of its tables on this rank."""
    rank = dist.get_rank()
    sent = FROM_COLUMNS(columns, list(widths))
    received = exchange(sent, [size * widths[rank] for size in rows], [rows[rank] * width for width in widths])
    return (received / 2).view([sum(rows), widths[rank]])


def forward_sum(tables: Tensor, rows: Sequence[int] = ROWS) -> Tensor:
    """Adds what the ranks looked up in their rows of the tables."""
    own = rows[dist.get_rank()]
    received = exchange(tables, [own] * 2, list(rows))
    return torch.stack(aten.split_with_sizes.default(received, [own] * 2)).sum(0)


def backward_sum(columns: Tensor, rows: Sequence[int] = ROWS) -> Tensor:
    """Sends the gradient of a sum to each rank that added to it."""
    own = rows[dist.get_rank()]
    return exchange(torch.cat([*columns.expand(2, own, columns.shape[1])]), list(rows), [own] * 2) / 2


def table(values: Tensor, num_dims: int) -> Tensor:
    """A lookup's output: its dims are numbers, where the inputs of these graphs have symbols."""
    return values.view([sum(ROWS), num_dims])


def own(widths: Sequence[Sequence[int]] = WIDTHS) -> list[int]:
    return [width[dist.get_rank()] for width in widths]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def lookup_of_all() -> tuple[Step, list[Tensor]]:
    """As fuse-tbe leaves it: one lookup, whose columns are split and whose gradients are joined."""
    rank = dist.get_rank()

    def step(pooled: Tensor, gradient: Tensor) -> list[Tensor]:
        dims = [dim for dim in own() if dim]
        parts = iter(SPLIT_FEATURES(pooled, dims, [sum(ROWS)] * len(dims)))
        tables = [next(parts) if dim else pooled.new_zeros(sum(ROWS), 0) for dim in own()]
        columns = torch.cat([forward(x, width) for x, width in zip(tables, WIDTHS, strict=True)], 1)
        gradients = gradient.split_with_sizes([sum(width) for width in WIDTHS], 1)
        pairs = reversed([*zip(gradients, WIDTHS, strict=True)])
        received = [backward(part, width) for part, width in pairs][::-1]
        joined = JOIN_FEATURES([part for part in received if part.shape[1]], sum(ROWS))
        return [columns, joined, *(part for part in received if not part.shape[1])]

    return step, [random(sum(ROWS), sum(own())), random(ROWS[rank], sum(map(sum, WIDTHS)))]


def separate_lookups() -> tuple[Step, list[Tensor]]:
    """Nothing is joined before; and columns that are read as if they were contiguous."""
    rank, dims = dist.get_rank(), own((WIDTHS[2], (2, 2)))

    def step(a: Tensor, b: Tensor, gradient: Tensor) -> list[Tensor]:
        widths = WIDTHS[2], (2, 2)
        columns = [
            forward(table(values, dim), width) for values, dim, width in zip((a, b), dims, widths, strict=True)
        ]
        flat = columns[0].view(-1) * 2
        back = [backward(part, width) for part, width in zip(gradient.split([8, 4], 1), widths, strict=True)]
        return [*columns, flat, *(part.view(-1) + 1 for part in back)]

    return step, [*(random(sum(ROWS), dim) for dim in dims), random(ROWS[rank], 12)]


def cut_by_rows() -> tuple[Step, list[Tensor]]:
    """Tables that each rank holds rows of, beside those of :func:`lookup_of_all`, in one lookup."""
    rank, widths = dist.get_rank(), WIDTHS[2]

    def step(pooled: Tensor, gradient: Tensor) -> list[Tensor]:
        dims = [6, widths[rank]]
        cut, whole = SPLIT_FEATURES(pooled, dims, [sum(ROWS)] * 2)
        columns = torch.cat([forward_sum(cut), forward(whole, widths)], 1)
        of_cut, of_whole = aten.split_with_sizes.default(gradient, [6, 8], 1)
        received = backward(of_whole, widths)
        return [columns, JOIN_FEATURES([backward_sum(of_cut), received], sum(ROWS))]

    return step, [random(sum(ROWS), 6 + widths[rank]), random(ROWS[rank], 14)]


def cut_by_rows_alone() -> tuple[Step, list[Tensor]]:
    """What arrives is not divided, or read as contiguous; what is split unevenly is packed."""

    def step(a: Tensor, b: Tensor, gradient: Tensor) -> list[Tensor]:
        own = ROWS[dist.get_rank()]
        sums = [forward_sum(table(a, 4)), forward_sum(table(b, 2))]
        of_two = torch.cat([*gradient.expand(2, own, 4)])
        plain = exchange(of_two, list(ROWS), [own] * 2)
        uneven = aten.split_with_sizes.default(exchange(table(a, 4), [own] * 2, list(ROWS)), [own + 1, own - 1])
        return [*sums, plain.view(-1) + 1, backward_sum(gradient).view(-1), *uneven]

    return step, [random(5, 4), random(5, 2), random(ROWS[dist.get_rank()], 4)]


def other_batch() -> tuple[Step, list[Tensor]]:
    """Two modules have one batch, the third has another; each is a class of its own."""
    rows = (1, 4)

    def step(*tables: Tensor) -> list[Tensor]:
        sizes = ROWS, rows, ROWS
        return [forward(table(x, 2), (2, 2), size) for x, size in zip(tables, sizes, strict=True)]

    return step, [random(5, 2) for _ in range(3)]


def near_misses() -> tuple[Step, list[Tensor]]:
    """What arrives is read twice, or what is sent is no tensor of columns on one rank."""
    rank = dist.get_rank()

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        splits = [2 * ROWS[rank]] * 2, [2 * size for size in ROWS]
        received = exchange(table(x, 2).view(-1), *splits)
        flat = table(y, 2).view(-1)
        odd = exchange(flat if rank == 0 else flat + 0, *splits)
        return [received, TO_COLUMNS(received, ROWS[rank], [2, 2]), TO_COLUMNS(odd, ROWS[rank], [2, 2])]

    return step, [random(5, 2), random(5, 2)]


CASES = (lookup_of_all, separate_lookups, cut_by_rows, cut_by_rows_alone, other_batch, near_misses)


def bucketed(graph: TrainGraph) -> TrainGraph:
    return Pipeline((BucketPooledAllToAll(), BucketAllToAll())).run(graph)


def check(graph: TrainGraph, inputs: list[Tensor]) -> tuple[bool, dict[str, int], bool]:
    result = bucketed(graph)
    counts = Counter(node.target for node in result.graph.nodes)
    targets = {"all_to_all": ALL_TO_ALL, "pack": PACK, "columns": TO_COLUMNS, "join": JOIN_FEATURES}
    targets |= {"from columns": FROM_COLUMNS, "div": aten.div.Tensor, "split": SPLIT_FEATURES}
    same = all(map(same_bits, graph.module(*inputs), result.module(*inputs)))
    again = bucketed(result).module.code == result.module.code
    return same, {name: counts[target] for name, target in targets.items() if counts[target]}, again


def compiled_again() -> str:
    """What a rank says that compiles again, and now has two batches where it told the others of one."""
    remembered: dict[Hashable, Any] = {}
    tables = [random(5, 2) for _ in range(3)]
    bucketed(capture(lambda *xs: [forward(table(x, 2), (2, 2)) for x in xs], *tables, remembered=remembered))
    message = ""
    if dist.get_rank() == 1:
        with pytest.raises(AgreementError) as error:
            bucketed(capture(other_batch()[0], *tables, remembered=remembered))
        message = str(error.value)
    dist.barrier()
    return message


def check_on_ranks() -> tuple[dict[str, Any], str]:
    results = {}
    for case in CASES:
        step, inputs = case()
        kinds = [InputKind.VALUE] * len(inputs)
        if case not in (other_batch, near_misses):
            kinds[-1] = InputKind.TANGENT
        results[case.__name__] = check(capture(step, *inputs, stage=Stage.JOINT, kinds=kinds), inputs)
    return results, compiled_again()


@pytest.mark.multiprocess
def test_ranks() -> None:
    for rank, (results, message) in enumerate(run_ranks(check_on_ranks, 2)):
        assert results == {
            # One exchange each way; what the lookup returns and what is joined stay whole, and are divided at once.
            # One module has no tables on this rank: its empty tensor is divided on its own.
            "lookup_of_all": (True, {"all_to_all": 2, "div": 2}, True),
            "separate_lookups": (True, {"all_to_all": 2, "join": 1, "div": 1}, True),
            "cut_by_rows": (True, {"all_to_all": 2, "div": 1}, True),
            "cut_by_rows_alone": (True, {"all_to_all": 2, "pack": 2, "join": 1, "div": 1}, True),
            "other_batch": (True, {"all_to_all": 1, "pack": 1, "join": 1}, True),
            "near_misses": (True, {"all_to_all": 1, "pack": 1, "columns": 2}, True),
        }
        assert message == (
            "rank 1 compiled the model again, and now modules have batches of different sizes, of which it told the "
            "other ranks that they are equal. Disable 'bucket-pooled-all-to-all' for this model"
        ) * (rank == 1)
