"""Pooled embeddings that several all-to-alls carry, or one: proved; columns, rows or ranks exchanged: not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("torchrec")
import tests.helpers.recommenders  # noqa: F401  loads TorchRec's operators without its warnings  # isort: skip
import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import ProofError
from graphpasses.graph import ALL_TO_ALL, Stage, TrainGraph
from graphpasses.ops.join_lookups import JOIN_FEATURES, SPLIT_FEATURES
from graphpasses.ops.pack_all_to_all import PACK_POOLED_EMBEDDINGS
from graphpasses.passes import BucketAllToAll, BucketPooledAllToAll, EliminateSplitCat
from graphpasses.passes.runner import Pipeline
from graphpasses.proof.prove import prove
from tests.helpers.all_to_alls import capture, exchange

aten = torch.ops.aten
TO_COLUMNS = torch.ops.torchrec._split_1d_cat_2d.default
FROM_COLUMNS = torch.ops.torchrec._split_1d_cat_2d_backward_impl.default
Widths = tuple[tuple[int, int], tuple[int, int]]  # of each module, columns of each rank's tables
WIDTHS: Widths = ((2, 3), (4, 3))
CUT = 3  # columns of a table that is cut by rows
PASSES = (BucketPooledAllToAll(), BucketAllToAll(), EliminateSplitCat())


def step(own: Tensor, other: Tensor, of_modules: Widths = WIDTHS) -> list[Tensor]:
    """Looks up for this rank's samples and for the other's, and sends gradients back."""
    rows = own.shape[0], other.shape[0]
    dims = [*(widths[0] for widths in of_modules if widths[0]), CUT]
    pooled = torch.cat([own, other]).unsqueeze(1) * torch.arange(1.0, 1.0 + sum(dims))
    *looked_up, cut = SPLIT_FEATURES(pooled, dims, [sum(rows)] * len(dims))
    parts = iter(looked_up)
    columns = [
        to_batch(next(parts) if widths[0] else pooled.new_empty(sum(rows), 0), widths, rows) for widths in of_modules
    ]
    received = exchange(cut, [rows[0]] * 2, list(rows))
    columns.append(torch.stack(aten.split_with_sizes.default(received, [rows[0]] * 2)).sum(0))
    of_cut = columns[2] * 3
    sent = torch.cat([*of_cut.unsqueeze(0).expand(2, rows[0], CUT)])
    gradients = [exchange(sent, list(rows), [rows[0]] * 2) / 2]
    for x, widths in zip(columns[1::-1], of_modules[::-1], strict=True):
        flat = exchange(
            FROM_COLUMNS(x * 3, list(widths)), [n * widths[0] for n in rows], [rows[0] * n for n in widths]
        )
        gradients.append((flat / 2).view([sum(rows), widths[0]]))
    return [torch.cat(columns, 1), JOIN_FEATURES(gradients[::-1], sum(rows))]


def to_batch(part: Tensor, widths: Sequence[int], rows: Sequence[int]) -> Tensor:
    received = exchange(part.view(-1), [rows[0] * n for n in widths], [n * widths[0] for n in rows])
    return TO_COLUMNS(received, rows[0], list(widths))


def nodes(graph: TrainGraph, target: Any) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=target)


def columns_exchanged(graph: TrainGraph) -> None:
    """Two modules' columns of the other rank, which are as many."""
    (cat,) = [node for node in nodes(graph, aten.cat.default) if len(node.args[0]) == 5]  # type: ignore[arg-type]
    parts: Any = [*cat.args[0]]  # type: ignore[misc]
    parts[1], parts[3] = parts[3], parts[1]
    cat.args = (parts, *cat.args[1:])


def columns_shifted(graph: TrainGraph) -> None:
    part = next(node for node in nodes(graph, aten.slice.Tensor) if node.args[1:] == (1, 0, 2))
    part.args = (part.args[0], 1, 1, 3)


def order_of_modules(graph: TrainGraph) -> None:
    """What is sent of two modules to the first rank, in another order."""
    (pack,) = nodes(graph, PACK_POOLED_EMBEDDINGS)
    pieces: Any = [*pack.args[0]]
    pieces[0], pieces[1] = pieces[1], pieces[0]
    pack.args = (pieces, pack.args[1])


def ranks_exchanged(graph: TrainGraph) -> None:
    """What is sent to one rank, to the other: it is as much."""
    (pack,) = nodes(graph, PACK_POOLED_EMBEDDINGS)
    pieces: Any = [*pack.args[0]]
    pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
    pack.args = (pieces, pack.args[1])


def sent_in_another_order(graph: TrainGraph) -> None:
    pooled = nodes(graph, SPLIT_FEATURES) or nodes(graph, aten.mul.Tensor)
    (view,) = [node for node in nodes(graph, aten.view.default) if node.args[0] is pooled[0]]
    with graph.graph.inserting_before(view):
        turned = graph.emit(aten.flip.default, (pooled[0], [1]), like=view)
    view.replace_input_with(pooled[0], turned)


def sizes_exchanged(graph: TrainGraph, which: int = 0) -> None:
    """What goes to each rank, where the other's is to go."""
    launch = nodes(graph, ALL_TO_ALL)[which]
    sent, outputs, inputs, group = launch.args
    launch.args = (sent, outputs, inputs[::-1], group)  # type: ignore[index]


def not_scaled(graph: TrainGraph) -> None:
    (div,) = nodes(graph, aten.div.Tensor)
    div.args = (div.args[0], 4)


WRONG = [
    columns_exchanged,
    columns_shifted,
    order_of_modules,
    ranks_exchanged,
    sent_in_another_order,
    sizes_exchanged,
    not_scaled,
]


def merged(of_modules: Widths = WIDTHS, *, is_static: bool = False) -> tuple[TrainGraph, TrainGraph]:
    def of_these(own: Tensor, other: Tensor) -> list[Tensor]:
        assert not is_static or own.shape[0] == 3  # which the graph knows from then on
        return step(own, other, of_modules)

    before = capture(of_these, torch.ones(3), torch.ones(2), stage=Stage.JOINT)
    after = Pipeline(PASSES).run(before)
    assert (len(nodes(before, ALL_TO_ALL)), len(nodes(after, ALL_TO_ALL))) == (6, 2)
    return before, after


def test_what_travels_side_by_side_is_proved() -> None:
    with fake_process_group(2):
        certificate = gp.prove(*merged())
    assert not certificate.unproved
    assert {"columns side by side", "features"} <= certificate.axioms.keys()


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_what_is_wrong_is_not(change: Callable[[TrainGraph], None]) -> None:
    with fake_process_group(2):
        before, after = merged()
        change(after)
        with suppress(ProofError):
            assert gp.prove(before, after).unproved


@pytest.mark.parametrize("of_modules", [((0, 3), (4, 3)), ((2, 3), (0, 3))], ids=["first", "second"])
def test_a_module_of_which_this_rank_has_no_tables_is_proved(of_modules: Widths) -> None:
    with fake_process_group(2):
        before, after = merged(of_modules)
        assert not gp.prove(before, after).unproved
        # Two modules' columns of the other rank, who has tables of both.
        received = nodes(after, aten.view.default)[2]
        one, two = [node for node in received.users if node.target == aten.slice.Tensor][:2]
        one.args, two.args = two.args, one.args
        with suppress(ProofError):
            assert gp.prove(before, after).unproved


Change = Callable[[TrainGraph], None]


def received_exchanged(graph: TrainGraph) -> None:
    """What two all-to-alls bring, of which this rank sends nothing, and the other perhaps something else."""
    (cat,) = [node for node in nodes(graph, aten.cat.default) if nodes(graph, TO_COLUMNS)[0] in node.all_input_nodes]
    one, two, *others = cat.args[0]  # type: ignore[misc]
    cat.args = ([two, one, *others], *cat.args[1:])


@pytest.mark.parametrize("change", [None, received_exchanged])
def test_launches_in_which_this_rank_sends_the_same_are_several(change: Change | None) -> None:
    def of_the_other(own: Tensor, other: Tensor) -> list[Tensor]:
        return step(own, other, ((0, 3), (0, 3)))

    with fake_process_group(2):
        before = capture(of_the_other, torch.ones(3), torch.ones(2), stage=Stage.JOINT)
        after = before.copy()
        if change is not None:
            change(after)
        assert bool(gp.prove(before, after).unproved) is (change is not None)


def test_modules_of_which_this_rank_has_no_tables_are_proved() -> None:
    with fake_process_group(2):
        assert not gp.prove(*merged(((0, 3), (0, 3)))).unproved


def test_a_rank_that_sends_nothing_is_sent_all_modules_as_one() -> None:
    def look_up(own: Tensor, other: Tensor) -> list[Tensor]:
        rows = own.shape[0], other.shape[0]
        return [torch.cat([to_batch(own.new_empty(sum(rows), 0), (0, num), rows) for num in (3, 3)], 1)]

    with fake_process_group(2):
        before = capture(look_up, torch.ones(3), torch.ones(2), stage=Stage.JOINT)
        after = Pipeline(PASSES[:-1]).run(before)
        assert (len(nodes(before, ALL_TO_ALL)), len(nodes(after, ALL_TO_ALL))) == (2, 1)
        assert not gp.prove(before, after).unproved
        (cat,) = nodes(after, aten.cat.default)
        cat.args = (cat.args[0][::-1], 1)  # type: ignore[index]
        with suppress(ProofError):
            assert gp.prove(before, after).unproved


def test_a_batch_of_a_known_size_is_proved() -> None:
    with fake_process_group(2):
        before, after = merged(is_static=True)
        assert not gp.prove(before, after).unproved
        order_of_modules(after)
        with suppress(ProofError):
            assert gp.prove(before, after).unproved


def test_a_rank_that_has_no_tables_is_sent_nothing() -> None:
    def send(x: Tensor) -> list[Tensor]:
        pooled = x.unsqueeze(1) * torch.arange(1.0, 3.0)
        return [exchange(PACK_POOLED_EMBEDDINGS([pooled], [1, 0]), [6, 6], [pooled.numel(), 0])]

    with fake_process_group(2):
        graph = capture(send, torch.ones(3), stage=Stage.JOINT)
        assert prove(graph, graph.copy()).proved
