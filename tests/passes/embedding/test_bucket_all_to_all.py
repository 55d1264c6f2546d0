"""Buckets of all-to-alls: equal bits on two and four ranks, the same decisions on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpasses import agreement
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import AgreementError
from graphpasses.graph import ALL_TO_ALL, WAIT, InputKind, Stage, TrainGraph
from graphpasses.graph.nodes import collective_group
from graphpasses.ops.pack_all_to_all import PACK, UNPACK
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import BucketAllToAll
from graphpasses.passes.runner import Pipeline
from tests.helpers.all_to_alls import Step, capture, evenly, exchange
from tests.helpers.models import same_bits

NAME = "bucket-all-to-all"
c10d = torch.ops._c10d_functional
Case = Callable[[], tuple[Step, list[Tensor]]]


def bucketed(graph: TrainGraph) -> tuple[int, TrainGraph]:
    result = Pipeline((BucketAllToAll(),)).run(graph)
    return result.report[NAME].num_rewrites, result


def launches(graph: TrainGraph) -> list[str]:
    """The operators of the graph's collectives, in order."""
    found = [node for node in graph.graph.nodes if collective_group(node) is not None]
    return [node.target.__name__.removesuffix(".default") for node in found]


# ---- steps, on any number of ranks ----------------------------------------------------------------------


def rows(source: int, target: int, member: int) -> int:
    """How many rows one rank sends another; none, some of the time."""
    return (3 * source + 2 * target + member) % 4


def splits_of(member: int) -> tuple[list[int], list[int]]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    received = [rows(source, rank, member) for source in range(num_ranks)]
    return received, [rows(rank, target, member) for target in range(num_ranks)]


def numbers(num_rows: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 1000, (num_rows, *shape), generator=generator)


def static_splits() -> tuple[Step, list[Tensor]]:
    splits = [splits_of(member) for member in range(3)]

    def step(*tensors: Tensor) -> list[Tensor]:
        return [exchange(x, *split) + 1 for x, split in zip(tensors, splits, strict=True)]

    return step, [numbers(sum(split[1])) for split in splits]


def mixed_dtypes_and_shapes() -> tuple[Step, list[Tensor]]:
    splits = [splits_of(member) for member in range(7)]
    splits[4] = ([0] * dist.get_world_size(),) * 2

    def step(*tensors: Tensor) -> list[Tensor]:
        turned = [*tensors[:2], tensors[2].transpose(1, 2), *tensors[3:]]  # not contiguous
        return [exchange(x, *split) for x, split in zip(turned, splits, strict=True)]

    shapes = [(), (3,), (2, 4), (1,), (2,), (0,), ()]
    inputs = [numbers(sum(split[1]), *shape) for split, shape in zip(splits, shapes, strict=True)]
    dtypes = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.int32, torch.uint8]
    return step, [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]


def dynamic_splits() -> tuple[Step, list[Tensor]]:
    """Two tables: splits, then lengths, values and weights, then what is pooled of them, and back."""
    num_ranks = dist.get_world_size()

    def table(sent: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        input_splits, output_splits = sent.tolist(), evenly(sent).tolist()
        values = exchange(values, output_splits, input_splits)
        weights = exchange(weights, output_splits, input_splits)
        pooled = (values[:, None] * weights).cumsum(0)
        return exchange(pooled, input_splits, output_splits)

    def step(*tensors: Tensor) -> list[Tensor]:
        return [table(*tensors[:3]), table(*tensors[3:]), torch.nonzero(evenly(tensors[0]))]

    inputs = []
    for member in (0, 1):
        sent = torch.tensor(splits_of(member)[1])
        num_rows = int(sent.sum())
        inputs += [sent, numbers(num_rows), numbers(num_rows, 2).float() / 7]
    assert len(inputs[0]) == num_ranks
    return step, inputs


def dependent() -> tuple[Step, list[Tensor]]:
    def step(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        chained = evenly(evenly(evenly(x) + 1) * 2)
        once = evenly(y) - 1
        return [chained, once, evenly(z + once[0])]

    return step, [numbers(dist.get_world_size()) for _ in range(3)]


def other_collectives() -> tuple[Step, list[Tensor]]:
    world = dist.group.WORLD.group_name

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        a = evenly(x)
        total = WAIT(c10d.all_reduce(a, "sum", world))  # moves behind the bucket of a and b
        whole = WAIT(c10d.all_gather_into_tensor(y, dist.get_world_size(), world))  # stays before it
        b = evenly(y)
        return [total, whole, b, evenly(total)]

    return step, [numbers(dist.get_world_size()) for _ in range(2)]


def writes_and_random_numbers() -> tuple[Step, list[Tensor]]:
    def step(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        a = evenly(x)
        noise = torch.rand_like(a.float())
        b = a * 2
        x.add_(100)  # behind the pack of x
        c = evenly(y)
        x.mul_(3)
        view = z.view(-1)
        view.add_(1)
        noise_too = torch.rand_like(c.float())
        return [a, b, c, x + 1, noise, noise_too, evenly(z), evenly(x)]

    return step, [numbers(dist.get_world_size()) for _ in range(3)]


def two_groups() -> tuple[Step, list[Tensor]]:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    others = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half, other = halves[rank // 2].group_name, others[rank % 2].group_name

    def step(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        first = evenly(a, half, [2, 2])
        return [
            first,
            evenly(b, other, [2, 2]),
            evenly(c, half, [2, 2]),
            evenly(d + first, other, [2, 2]),
            evenly(a, other, [2, 2]),
        ]

    return step, [numbers(4) for _ in range(4)]


def read_on_one_rank() -> tuple[Step, list[Tensor]]:
    """As with tables on rank 0 alone: only there does what is sent back depend on what came."""
    is_first = dist.get_rank() == 0

    def step(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        a, b = evenly(x), evenly(y)
        return [evenly(a + b if is_first else z), evenly(z)]

    return step, [numbers(dist.get_world_size()) for _ in range(3)]


def swapped() -> tuple[Step, list[Tensor]]:
    """The same collectives as ``read_on_one_rank``; the third depends on the others on every other rank."""
    is_first = dist.get_rank() == 0

    def step(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        a, b = evenly(x), evenly(y)
        c = evenly(a + b if is_first else z)
        return [c, evenly(z if is_first else c)]

    return step, [numbers(dist.get_world_size()) for _ in range(3)]


def check(case: Case) -> dict[str, Any]:
    """Runs a step as captured and bucketed; returns what must be equal on all ranks."""
    step, inputs = case()
    graph = capture(step, *inputs)
    num_buckets, result = bucketed(graph)
    values = []
    for module in (graph.module, result.module):
        torch.manual_seed(0)
        copies = [x.clone() for x in inputs]
        values.append([*module(*copies), *copies])
    num_again, again = bucketed(result)
    return {
        "buckets": num_buckets,
        "same bits": all(map(same_bits, *values)),
        "before": Counter(launches(graph))["all_to_all_single"],
        "launches": launches(result),
        "again": (num_again, again.module.code == result.module.code),
    }


def expected(num_before: int, num_buckets: int, found: Sequence[str]) -> dict[str, Any]:
    return {
        "buckets": num_buckets,
        "same bits": True,
        "before": num_before,
        "launches": list(found),
        "again": (0, True),
    }


A2A = "all_to_all_single"
CASES: dict[Case, dict[str, Any]] = {
    static_splits: expected(3, 1, [A2A]),
    mixed_dtypes_and_shapes: expected(7, 1, [A2A]),
    dynamic_splits: expected(9, 3, [A2A] * 3),
    dependent: expected(5, 2, [A2A] * 3),
    other_collectives: expected(3, 1, ["all_gather_into_tensor", A2A, "all_reduce", A2A]),
    writes_and_random_numbers: expected(4, 1, [A2A] * 2),
    read_on_one_rank: expected(4, 1, [A2A] * 2),
}


def check_decisions() -> dict[str, Any]:
    """What a rank would decide alone, what it decides with the others, and when it is alone again."""
    step, inputs = read_on_one_rank()
    graph = capture(step, *inputs)
    with mock.patch.object(agreement, "is_alone", return_value=True):
        seen: dict[str, Any] = {"alone": len(launches(bucketed(graph)[1]))}
    together = bucketed(graph)[1].module.code
    if dist.get_rank() == 1:  # no other rank compiles again
        assert bucketed(capture(step, *inputs, remembered=graph.remembered))[1].module.code == together
        with pytest.raises(AgreementError) as error:
            bucketed(capture(swapped()[0], *inputs, remembered=graph.remembered))
        seen["again"] = str(error.value)
    dist.barrier()
    extra = [] if dist.get_rank() == 0 else [inputs[0]]
    with pytest.raises(AgreementError) as error:
        bucketed(capture(lambda *tensors: [evenly(x) for x in tensors], *inputs, *extra))
    return {**seen, "mismatch": str(error.value)}


def check_on_ranks(*cases: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    return {case.__name__: check(case) for case in cases}, check_decisions()


# ---- tests ----------------------------------------------------------------------------------------------


ON_FOUR = {case: CASES[case] for case in (mixed_dtypes_and_shapes, dynamic_splits, read_on_one_rank)}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, CASES), (4, {**ON_FOUR, two_groups: expected(5, 2, [A2A] * 3)})]
)
def test_ranks(num_ranks: int, cases: dict[Case, dict[str, Any]]) -> None:
    results = run_ranks(check_on_ranks, num_ranks, *cases)
    for rank, (checks, _) in enumerate(results):
        for case, outcome in cases.items():
            assert (rank, case.__name__, checks[case.__name__]) == (rank, case.__name__, outcome)
    decisions = [decision for _, decision in results]
    assert [decision["alone"] for decision in decisions] == [2] + [1] * (num_ranks - 1)
    assert decisions[1]["again"] == (
        "rank 1 compiled the step graph again, and now its collective number 4 depends on one with which all ranks "
        "agreed to launch it. Disable 'bucket-all-to-all' for this model"
    )
    described = f"{ALL_TO_ALL} of torch.int64 on cpu in process group 0"
    mismatch = (
        f"ranks 0 and 1 compile different collectives: number 4 is nothing more on rank 0, {described} on rank 1; "
        "every rank must run the same modules in the same order"
    )
    assert {decision["mismatch"] for decision in decisions} == {mismatch}


def test_few_nodes() -> None:
    with fake_process_group(2):
        step, inputs = dynamic_splits()
        graph = capture(step, *inputs)
        _, result = bucketed(graph)
        counts = Counter(node.target for node in result.graph.nodes)
        assert counts[PACK] == counts[UNPACK] == counts[ALL_TO_ALL] == counts[WAIT] == 3
        pack = result.graph.find_nodes(op="call_function", target=PACK)[1]
        assert len(pack.args[0]) == 4
        assert pack.meta["val"].dtype == torch.uint8
        # A sum per rank and direction and its parts: lengths as one, values and weights as one.
        added = counts[torch.sym_sum] - Counter(node.target for node in graph.graph.nodes)[torch.sym_sum]
        assert added <= 3 * 4
        before, after = ([str(value.meta["val"].shape) for value in g.output_values] for g in (graph, result))
        assert before == after


def test_backward_waits_for_forward() -> None:
    """In a joint graph the gradient's exchange needs no forward value, and yet comes after all of them."""

    def step(x: Tensor, y: Tensor, tangent: Tensor) -> list[Tensor]:
        return [
            evenly(x),
            evenly(y),
            evenly(tangent),
            evenly(x * 0),
        ]  # the last is a gradient that is zero here

    with fake_process_group(2):
        inputs = [torch.arange(2) + index for index in range(3)]
        for kind, num_left in ((InputKind.TANGENT, 2), (InputKind.VALUE, 1)):
            kinds = [InputKind.VALUE, InputKind.VALUE, kind]
            graph = capture(step, *inputs, stage=Stage.JOINT, kinds=kinds)
            num_buckets, result = bucketed(graph)
            assert (num_buckets, len(launches(result))) == (1, num_left)
            assert bucketed(result)[0] == 0


def test_one_is_left_alone() -> None:
    with fake_process_group(2):
        graph = capture(lambda x: [evenly(x), x + 1], torch.arange(2))
        num_buckets, result = bucketed(graph)
        assert num_buckets == 0
        assert result.module.code == graph.module.code


def test_unread_ones_stay() -> None:
    with fake_process_group(2):
        graph = capture(lambda x: [(x, evenly(x), evenly(x + 1))[0]], torch.arange(2))
        assert len(launches(graph)) == 2
        _, result = bucketed(graph)
        assert len(launches(result)) == 1
        assert not result.graph.find_nodes(op="call_function", target=UNPACK)
