"""Sizes that ranks tell each other: proved where all ranks told that they are equal, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.symbols import unify_sizes
from graphpasses.agreement import Told
from graphpasses.graph import TrainGraph
from graphpasses.ops.pack_all_to_all import UNPACK
from graphpasses.ops.size_tensor import SIZE_TENSOR
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import BucketAllToAll, DeduplicateSizes, FuseSizeTensors
from graphpasses.passes.runner import GraphPass, Pipeline
from graphpasses.proof.core.values import Piece, Value
from graphpasses.proof.rows import RowValues
from graphpasses.proof.sizes import Sizes, unpacked
from tests.helpers.all_to_alls import capture, exchange
from tests.passes.embedding.test_deduplicate_sizes import READ, inputs, other_on_rank_1, send
from tests.proof.materialized import materialized


def two_modules(x: Tensor, y: Tensor) -> list[Tensor]:
    """Sends the sizes of two batches, then that of the first again."""
    return [x.new_zeros(size) for size in (*send(x.shape[0], y.shape[0]), *send(x.shape[0]))]


def unevenly(x: Tensor, y: Tensor) -> list[Tensor]:
    """Sends rank 1 one size more than rank 0, with a constant, then sizes of the same batches to both."""
    x_size, y_size = (torch.ops.aten.scalar_tensor.default(each.shape[0], dtype=torch.int64) for each in (x, y))
    own, one = 2 + dist.get_rank(), torch.tensor(1)
    received = exchange(torch.stack([y_size, one, y_size, x_size, one]), [own] * 2, [2, 3])
    sizes = [received[index].item() for index in range(2 * own)]
    return [x.new_zeros(size) for size in (*sizes, *send(x.shape[0]))]


PASSES = (DeduplicateSizes(), BucketAllToAll(), FuseSizeTensors())


def reads_another(graph: TrainGraph, of: int, instead: int) -> None:
    """Reads one size in the place of another, by their places among all that are read, and takes them for equal."""
    reads = graph.graph.find_nodes(op="call_function", target=READ)
    unify_sizes(reads[of], reads[instead])
    reads[of].replace_all_uses_with(reads[instead])


def sends_another(graph: TrainGraph, of: int, instead: int) -> None:
    """Sends one size in the place of another, in the tensor that carries all."""
    (tensor,) = graph.graph.find_nodes(op="call_function", target=SIZE_TENSOR)
    sizes: Any = [*tensor.args[0]]
    sizes[of] = sizes[instead]
    tensor.args = (sizes, *tensor.args[1:])


def is_proved(step: Any, *passes: GraphPass) -> bool:
    """Whether all is proved after passes."""
    before = capture(step, *inputs())
    return bool(gp.prove(before, Pipeline(passes).run(before)))


def is_read_as(step: Any, of: int, instead: int, *passes: GraphPass) -> bool:
    """Whether one size is proved to be another, after passes that ask the other rank."""
    before = capture(step, *inputs())
    after = before.copy()
    after.told.update(Pipeline(passes).run(before).told)
    reads_another(after, of, instead)
    return bool(gp.prove(before, after))


def is_sent_as(of: int, instead: int, step: Any = two_modules, passes: Sequence[GraphPass] = PASSES) -> bool:
    """Whether it is proved that one size may be sent in another's place."""
    before = capture(step, *inputs())
    after = Pipeline(passes).run(before)
    sends_another(after, of, instead)
    with suppress(gp.GraphPassesError):
        return bool(gp.prove(before, after))
    return False


def asked() -> list[list[bool]]:
    """What is right, and what is not. The sizes are x and y of rank 0, x and y of rank 1, x of each again."""
    is_first = dist.get_rank() == 0
    ask = DeduplicateSizes()
    return [
        [
            is_proved(two_modules, *PASSES),
            is_proved(other_on_rank_1, ask),
            is_proved(unevenly, *PASSES),
            is_proved(two_modules, *PASSES[1:]),  # nobody was asked: each is known by where it stands
            is_read_as(two_modules, 4, 0, ask),
            is_read_as(two_modules, 5, 2, ask),
            is_read_as(other_on_rank_1, 2, 0, ask) or not is_first,
        ],
        [
            is_read_as(two_modules, 5, 0, ask),  # of another rank
            is_read_as(two_modules, 3, 2, ask),  # another of one rank
            is_read_as(two_modules, 5, 2) and is_first,  # nobody was asked; what comes from itself a rank knows
            is_read_as(other_on_rank_1, 3, 1, ask),  # which rank 1 does not send as one, but rank 0 does
            is_read_as(other_on_rank_1, 3, 1),  # likewise, and nobody was asked
            is_sent_as(0, 1, passes=PASSES[1:]),  # nobody was asked
            is_sent_as(4, 3, passes=PASSES[1:]),
            is_sent_as(0, 1),
            is_sent_as(4, 3),
            is_sent_as(0, 2, unevenly),  # to rank 0: y, 1, x; to rank 1: y, x, 1, x
            is_sent_as(4, 3, unevenly),
        ],
    ]


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 2, 3)], ids=["evenly", "unevenly"])
def test_what_is_told_stands_where_an_all_to_all_puts_it(counts: tuple[int, ...]) -> None:
    """Rank 1 of 3, where all ranks send alike: the sizes that they have for it."""
    num, own, sizes = 3, 1, torch.randint(100, (3, 6))  # of each rank, ``counts`` for each rank
    values = RowValues()
    sent = values.tensor(torch.int64, (6,), values.source(("input",), 6))
    with fake_process_group(num, own):
        group = dist.group.WORLD.group_name
        found = Sizes(values).brought("launch", sent, [2] * num, counts, group)
        assert Sizes(values).brought("", sent, [2, 2, 1], [2] * num, group) is None
        assert Sizes(values).brought("", sent, [1] * num, [1] * num, group) is None
    assert found is not None
    expected = torch.cat([of_rank.split(counts)[own] for of_rank in sizes])
    for piece in found.pieces or ():
        key = values.key(piece.source)
        is_own = key == ("input",)
        rank, place = own, piece.offset
        if not is_own:
            _, rank, _, offsets = key.parameters
            place = offsets[own if len(offsets) == num else 0]
        for index in range(piece.dims[0][0] if piece.dims else 1):
            assert int(expected[piece.start + index]) == int(sizes[rank, place + index])
            assert is_own == (piece.start + index in (2, 3))


def test_what_is_unpacked() -> None:
    values, x = RowValues(), torch.arange(12)
    packed = values.tensor(torch.int64, (12,), values.source(("input", "x"), 12))
    splits = [1, 3, 2, 6]  # of two tensors, from each of two ranks
    found = unpacked(values, packed, (splits, [], [0, 0], [torch.int64] * 2))
    expected = UNPACK(x, splits, [], [0, 0], [torch.int64] * 2)
    assert found is not None
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(materialized(values, one, {"x": x}), two)
    assert unpacked(values, packed, (splits, [], [0, 0], [torch.int64, torch.int32])) is None


@pytest.mark.multiprocess
def test_ranks_that_were_asked() -> None:
    for right, wrong in run_ranks(asked, 2):
        assert all(right), right
        assert not any(wrong), wrong


@pytest.mark.parametrize("num_alike", [3, 40])
def test_what_may_be_many_things_is_known_by_its_place(num_alike: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of launches that send the same some travel as one, and the other rank sends in each another size."""
    monkeypatch.setattr("graphpasses.proof.sizes.is_alone", lambda group: False)
    values, names = RowValues(), tuple(f"launch {index}" for index in range(num_alike))
    source = values.source(("input",), 3)
    said = [[[[rank * index], [1, 2]] for index in range(num_alike)] for rank in range(2)]

    def sent(*numbers: int) -> Value:
        pieces = tuple(Piece(index, (), source, number) for index, number in enumerate(numbers))
        return values.moved(torch.int64, (len(numbers),), pieces)

    with fake_process_group(2):
        group = dist.group.WORLD.group_name
        sizes = Sizes(values, {(DeduplicateSizes.name, group): Told(names, said)})
        of_each = [sizes.brought(name, sent(0, 1, 2), [1, 1], [1, 2], group) for name in names]
        sizes.begin_second()
        found = sizes.brought("", sent(0, 0, 1, 2, 1, 2), [2, 2], [2, 4], group)
    assert found is not None
    assert found.pieces is not None
    from_other = {piece.source for each in of_each if each is not None for piece in each.pieces or ()}
    assert from_other.isdisjoint(piece.source for piece in found.pieces if piece.source != source)


@pytest.mark.usefixtures("forget_compiled_code")
def test_one_of_two_equal_inputs_of_a_call_whose_number_of_rows_running_tells() -> None:
    class Model(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows = super().forward(x)
            rows = rows[rows[:, 0] > 0]
            return (torch.sigmoid(rows) - torch.sigmoid(rows)).square().sum() + rows.sum()

    model = Model(4, 4)
    compiled = gp.compile(model, pipeline=gp.recommender_pipeline(), inner="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(compiled(torch.eye(4)), model(torch.eye(4)))
