"""Sizes that every rank sends twice are read once; those that some rank does not, are not."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import AgreementError
from graphpasses.graph import TrainGraph
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import DeduplicateSizes
from graphpasses.passes.embedding.deduplicate_sizes import _question
from graphpasses.passes.runner import Pipeline
from tests.helpers.all_to_alls import Step, capture, exchange
from tests.helpers.models import same_bits

READ = torch.ops.aten._local_scalar_dense.default


def send(*sizes: Any) -> list[Any]:
    """Sends sizes to each of two ranks; returns what comes from rank 0, then what comes from rank 1."""
    tensor = torch.stack([torch.ops.aten.scalar_tensor.default(size, dtype=torch.int64) for size in sizes])
    splits = [len(sizes)] * 2
    received = exchange(torch.cat([tensor, tensor]), splits, splits)
    return [received[index].item() for index in range(2 * len(sizes))]


def two_modules(x: Tensor, y: Tensor) -> list[Tensor]:
    first, second = send(x.shape[0], y.shape[0], 7), send(x.shape[0], 7, 5)
    return [x.new_zeros(size) for size in (*first, *second)]


def other_on_rank_1(x: Tensor, y: Tensor) -> list[Tensor]:
    size = x.shape[0] if dist.get_rank() == 0 else y.shape[0]
    return [x.new_zeros(size) for size in (*send(x.shape[0]), *send(size))]


def sent_on(x: Tensor, y: Tensor) -> list[Tensor]:
    """Sends sizes that were received, as where a module looks up what another's rows say."""
    first = send(x.shape[0])
    second = send(x.shape[0])
    third = send(*second)
    return [x.new_zeros(size) for size in (*first, *second, *third)]


def inputs() -> list[Tensor]:
    rank = dist.get_rank()
    return [torch.zeros(2 + rank), torch.zeros(5 + rank)]


def deduplicated(graph: TrainGraph) -> tuple[int, TrainGraph]:
    result = Pipeline((DeduplicateSizes(),)).run(graph)
    return result.report["deduplicate-sizes"].num_rewrites, result


def reads(graph: TrainGraph) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=READ))


def check(step: Step) -> tuple[Any, ...]:
    graph = capture(step, *inputs())
    num_rewrites, result = deduplicated(graph)
    same = all(map(same_bits, graph.module(*inputs()), result.module(*inputs())))
    return num_rewrites, reads(graph) - reads(result), same, deduplicated(result)[0]


def again() -> str:
    """What a rank says that compiles again, and sends sizes that were equal and are not any more."""
    remembered: dict[Hashable, Any] = {}
    deduplicated(capture(lambda x, y: two_modules(x, x), *inputs(), remembered=remembered))
    message = ""
    if dist.get_rank() == 1:
        with pytest.raises(AgreementError) as error:
            deduplicated(capture(two_modules, *inputs(), remembered=remembered))
        message = str(error.value)
    dist.barrier()
    return message


@pytest.mark.parametrize(
    ("now", "is_wrong"),
    [
        ([0, 0], False),
        ([4, 4], False),  # other sizes, still the same
        ([4, 5], True),
        ([4, -6], True),  # one is a constant now
        ([-5, -5], False),  # both are
        ([-5, -6], True),  # both are, and they differ
    ],
)
def test_sizes_that_this_rank_told_to_be_equal(now: list[int], is_wrong: bool) -> None:
    everyone = [[[[7, 7], [-3]]], [[[0, 0], [-1]]]]  # per rank, per all-to-all, per receiver
    assert bool(_question(rank=1, num_ranks=2).contradiction(everyone, [[now, [-2]]])) == is_wrong


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_a_fake_group_send_what_this_one_sends(rank: int) -> None:
    with fake_process_group(2, rank):
        graph = capture(two_modules, *inputs())
        num_rewrites, result = deduplicated(graph)
        assert (num_rewrites, reads(graph) - reads(result)) == (4, 4)  # as on two real ranks, see below


def test_a_size_that_was_received_and_replaced_is_sent_on() -> None:
    with fake_process_group(2, 1):
        graph = capture(sent_on, *inputs())
        result = graph.copy()
        assert DeduplicateSizes().rewrite(result) == reads(graph) - reads(result) > 4
        result.graph.lint()  # nothing reads what was replaced


def check_on_ranks() -> tuple[Any, ...]:
    return check(two_modules), check(other_on_rank_1), again()


@pytest.mark.multiprocess
def test_ranks() -> None:
    for rank, (equal, other, message) in enumerate(run_ranks(check_on_ranks, 2)):
        # A rank knows what comes from itself: both sizes of the first module, and the one of the second. From the
        # other rank, the second module's size is the first's; constants are read.
        assert equal == (4, 4, True, 0)
        assert other == ((2, 2, True, 0) if rank == 0 else (3, 3, True, 0))
        assert message == (
            "rank 1 compiled the model again, and now sends two sizes that differ where it told the other ranks that "
            "they are equal, as the sizes of two batches may have been by chance. Disable 'deduplicate-sizes' for "
            "this model"
        ) * (rank == 1)
