"""A lookup that stands for several: it is proved to be each of them, and on FBGEMM's kernels it is, bit by bit."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn

pytest.importorskip("torchrec")

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen

import graphpasses as gp
from graphpasses._torch.schemas import AUTO_FUNCTIONALIZED
from graphpasses._torch.symbols import mark_dims
from graphpasses.errors import ProofError
from graphpasses.fbgemm.names import UPDATING_LOOKUP
from graphpasses.graph import Stage, TrainGraph
from graphpasses.identity import same_bits
from graphpasses.ops.join_lookups import JOIN_BAGS, SPLIT_FEATURES
from graphpasses.passes import FuseTBE
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from graphpasses.proof.prove import prove
from tests.helpers.all_to_alls import capture
from tests.helpers.tables import Bags, Look, Lookups, bags, tables

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


class Three(nn.Module):
    """Lookups in three modules of tables, one of which a dense layer reads."""

    def __init__(self, optimizer: str, pooling: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (tables([4] * number, optimizer, pooling) for number in (1, 2, 1))
        self.dense = nn.Linear(4, 4)

    def forward(self, a: Bags, b: Bags, c: Bags) -> Tensor:
        return (self.dense(self.a(*a)).square().sum() + self.b(*b).square().sum()) * self.c(*c).sum()


@pytest.mark.parametrize(("optimizer", "pooling"), [("rowwise_adagrad", "sum"), ("sgd", "none")])
def test_fused_lookups_are_proved_and_equal(optimizer: str, pooling: str) -> None:
    torch.manual_seed(0)
    eager = Three(optimizer, pooling)
    model, report = copy.deepcopy(eager), gp.CompileReport()
    compiled = gp.compile(model, pipeline=Pipeline((FuseTBE(),)), inner="aot_eager", report=report, prove=True)
    losses = []
    for each in (eager, compiled):  # a lookup's check writes its ids
        losses.append(each(*(bags(number, seed) for seed, number in enumerate((1, 2, 1)))))
        losses[-1].backward()
    assert report.by_graph["graph 0, dynamo"]["fuse-tbe"].num_rewrites == 3
    certificate = report.by_graph["graph 0, dynamo"].certificate
    assert certificate
    assert "fused lookups" in certificate.axioms
    assert same_bits(*losses)
    state = zip(eager.state_dict().items(), model.state_dict().values(), strict=True)
    assert all(same_bits(mine, its) for (_, mine), its in state)


def test_a_fused_lookup_of_tables_in_another_order_than_its_features() -> None:
    model = Lookups([tables([4, 8], features=[1, 0]), tables([4, 4], features=[1, 0, 1]), tables([4])])
    assert is_proved(model, model.batch(0), lambda _: None, FuseTBE())


@dataclass(frozen=True)
class Exchange(GraphPass):
    """Gives two lookups each other's columns, which have one shape."""

    name = "exchange"
    numerics = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        (split,) = graph.graph.find_nodes(op="call_function", target=SPLIT_FEATURES)
        parts = {int(node.args[1]): node for node in split.users if node.target is operator.getitem}
        parts[0].args, parts[2].args = (split, 2), (split, 0)
        return 1


def test_exchanged_lookups_are_not() -> None:
    """Control."""
    compiled = gp.compile(Three("sgd", "sum"), pipeline=Pipeline((FuseTBE(), Exchange())), inner="aot_eager")
    with pytest.raises(ProofError, match=r"^pass 'exchange' \(after fuse-tbe\) is not proved to keep output 0"):
        compiled(*(bags(number, seed) for seed, number in enumerate((1, 2, 1))))


@dataclass(frozen=True)
class Ask(Look):
    """Asks whether another graph, made from the one that it is given, is proved to be the first that was seen."""

    name = "ask"

    change: Callable[[fx.Graph], None] = lambda graph: None
    first: Look = field(default_factory=Look)
    answers: list[bool] = field(default_factory=list, compare=False)

    def rewrite(self, graph: TrainGraph) -> int:
        made = graph.copy()
        self.change(made.graph)
        made.graph.lint()
        try:
            self.answers.append(bool(prove(self.first.seen[0], made)))
        except ProofError:
            self.answers.append(False)
        return 0


def is_proved(model: nn.Module, batch: list[Bags], change: Callable[[fx.Graph], None], *passes: GraphPass) -> bool:
    """Whether a model's graph behind some passes, which is changed, is proved to be the one before them."""
    look = Look()
    ask = Ask(change=change, first=look)
    gp.compile(model, pipeline=Pipeline((look, *passes, ask)), inner="aot_eager", prove=False)(batch)
    (answer,) = ask.answers
    return answer


def cut_otherwise(graph: fx.Graph) -> None:
    """Has one lookup the sizes of another's, with the fake values that these had."""
    (join,) = graph.find_nodes(op="call_function", target=JOIN_BAGS)
    sizes = graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    one, two = (size for size in sizes if join < size)
    one.args = (two.args[0], 0)


class Filtered(Lookups):
    """Lookups in batches whose sizes only their data tell, as ranks tell each other those of theirs."""

    def forward(self, batch: Sequence[Bags]) -> Tensor:
        return super().forward([(ids, ends[ends >= 0], weights) for ids, ends, weights in batch])


@pytest.mark.parametrize(("kind", "pooling"), [(Lookups, "sum"), (Lookups, "none"), (Filtered, "sum")])
def test_sizes_that_cut_a_fused_lookup_are_computed_again(kind: type[Lookups], pooling: str) -> None:
    for change, answer in ((lambda _: None, True), (cut_otherwise, False)):
        torch.compiler.reset()
        model, batch = kind([tables([4], "sgd", pooling) for _ in range(2)]), [bags(1, 0, 3), bags(1, 1, 5)]
        for _, ends, _ in batch if kind is Filtered else ():
            mark_dims(ends, [0])
        assert is_proved(model, batch, change, FuseTBE()) is answer


class Doubled(Lookups):
    """Writes what lookups return."""

    def forward(self, batch: Sequence[Bags]) -> Tensor:
        outputs = [module(*inputs) for module, inputs in zip(self.tables, batch, strict=True)]
        return sum((output.mul_(2.0) * self.scale).sin().sum() for output in outputs)


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_the_model_may_write_what_a_fused_lookup_returns(pooling: str) -> None:
    model = Doubled([tables([4], "sgd", pooling) for _ in range(2)])
    assert is_proved(model, model.batch(0), lambda _: None, FuseTBE())


def write_later(graph: fx.Graph) -> None:
    """Checks ids, and so corrects them, only when they have been joined."""
    (lookup,) = (node for node in graph.nodes if UPDATING_LOOKUP.fullmatch(str(node.target)))
    for node in [node for node in graph.nodes if str(node.target).startswith("fbgemm.bounds_check")]:
        lookup.append(node)


def write_joined(graph: fx.Graph) -> None:
    (join,) = graph.find_nodes(op="call_function", target=JOIN_BAGS)
    ids = next(node for node in join.users if node.args[1] == 0)
    with graph.inserting_after(ids):
        graph.call_method("zero_", (ids,)).meta["val"] = ids.meta["val"]


def write_result(graph: fx.Graph) -> None:
    (lookup,) = (node for node in graph.nodes if UPDATING_LOOKUP.fullmatch(str(node.target)))
    with graph.inserting_after(lookup), torch.no_grad():
        graph.call_method("mul_", (lookup, 2)).meta["val"] = lookup.meta["val"]


@pytest.mark.parametrize("change", [write_later, write_joined, write_result])
def test_what_is_written_between_the_calls_of_a_fused_lookup_counts(change: Callable[[fx.Graph], None]) -> None:
    model, batch = Lookups([tables([4]) for _ in range(2)]), [bags(1, 0, 3), bags(1, 1, 5)]
    assert not is_proved(model, batch, change, FuseTBE())


def train_nothing(graph: fx.Graph) -> None:
    """Gives the lookup an input without a gradient where autograd would reach it by one that has one."""
    (lookup,) = (node for node in graph.nodes if UPDATING_LOOKUP.fullmatch(str(node.target)))
    lookup.update_kwarg("placeholder_autograd_tensor", lookup.kwargs["weights"][0])


def test_a_lookup_is_trained_only_if_autograd_reaches_it() -> None:
    model, batch = Lookups([tables([4]) for _ in range(2)]), [bags(1, 0, 3), bags(1, 1, 5)]
    assert not is_proved(model, batch, train_nothing, FuseTBE())


class Twice(Lookups):
    """Looks up the same in a table twice, without a check that would write the ids; perhaps through two modules."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__([tables([4], "rowwise_adagrad") for _ in range(2)])
        one, two = self.tables
        one.bounds_check_mode_int = two.bounds_check_mode_int = BoundsCheckMode.NONE.value
        if is_tied:
            two.weights_host, two.momentum1_host = one.weights_host, one.momentum1_host
        else:
            self.tables[1] = one

    def forward(self, batch: list[Bags]) -> Tensor:
        a, b = self.tables[0](*batch[0]), self.tables[1](*batch[0])
        return a.square().sum() + b.square().sum() + b.sin().sum()


def read_the_other(graph: fx.Graph) -> None:
    """Has one gradient go to the other update of the table."""
    a, b = (node for node in graph.nodes if UPDATING_LOOKUP.fullmatch(str(node.target)))
    by_user = {user: node for node in (a, b) for user in node.users}
    for user, node in by_user.items():
        if "square" in str(user.target):
            user.replace_input_with(node, b if node is a else a)


@pytest.mark.parametrize("is_tied", [False, True])
def test_each_lookup_of_a_table_updates_it_in_its_turn(is_tied: bool) -> None:
    for change, answer in ((lambda _: None, True), (read_the_other, False)):
        torch.compiler.reset()
        assert is_proved(Twice(is_tied=is_tied), [bags(1, 0)], change) is answer


class Halved(Three):
    """Writes a table, or its learning rate, before it looks up in another, and then in this."""

    def __init__(self, written: str) -> None:
        super().__init__("sgd", "sum")
        self.written = written

    def forward(self, a: Bags, b: Bags, c: Bags) -> Tensor:
        getattr(self.a, self.written).mul_(0.5)
        return self.b(*b).sum() + self.a(*a).sum() + self.c(*c).sum()


@dataclass(frozen=True)
class WriteLater(GraphPass):
    """Writes the table behind one of the lookups."""

    name = "write-later"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.DYNAMO})

    number: int

    def rewrite(self, graph: TrainGraph) -> int:
        (write,) = (node for node in graph.graph.nodes if node.target == "mul_")
        lookups = [node for node in graph.graph.nodes if UPDATING_LOOKUP.fullmatch(str(node.target))]
        lookups[self.number].append(write)
        return 1


@pytest.mark.parametrize("number", [0, 1], ids=["another", "the lookup"])
@pytest.mark.parametrize("written", ["weights_host", "learning_rate_tensor"])
def test_a_lookup_reads_what_was_written_before(written: str, number: int) -> None:
    compiled = gp.compile(Halved(written), pipeline=Pipeline((WriteLater(number),)), inner="aot_eager", prove=True)
    with (
        torch.no_grad(),
        pytest.raises(ProofError, match="is not proved to keep output 0") if number else nullcontext(),
    ):
        compiled(*(bags(number, seed) for seed, number in enumerate((1, 2, 1))))


@dataclass(frozen=True)
class OneBase(GraphPass):
    """Has a call that AOTAutograd made functional write one copy twice, and another not at all."""

    name = "one-base"
    numerics = Numerics.BITWISE
    stages = frozenset({Stage.JOINT})

    def rewrite(self, graph: TrainGraph) -> int:
        call = next(node for node in graph.graph.nodes if "_offsets_base_index" in node.kwargs)
        call.kwargs = {**call.kwargs, "_offsets_base_index": call.kwargs["_indices_base_index"]}
        return 1


class Dense(nn.Module):
    """A lookup in a table that has a gradient, whose backward is given zeros that forward made."""

    def __init__(self) -> None:
        super().__init__()
        self.table = DenseTableBatchedEmbeddingBagsCodegen([(20, 4)], use_cpu=True)
        nn.init.uniform_(self.table.weights)

    def forward(self, ids: Tensor, ends: Tensor) -> Tensor:
        return self.table(ids, ends).square().sum()


def test_a_functional_call_that_writes_a_view_of_a_copy() -> None:
    report = gp.CompileReport()
    ids, ends, _ = bags(1, 0)
    gp.compile(Dense(), inner="aot_eager", report=report)(ids, ends).backward()
    backward = report.by_graph["graph 0, backward"]
    assert backward["reinplace-tbe-updates"].num_rewrites == 1
    assert backward.certificate


def test_a_functional_call_that_writes_one_copy_twice() -> None:
    compiled = gp.compile(Three("sgd", "sum"), pipeline=Pipeline((OneBase(),)), inner="aot_eager", prove=True)
    with pytest.raises(ProofError, match="is not proved"):
        compiled(*(bags(number, seed) for seed, number in enumerate((1, 2, 1))))


CHECK = torch.ops.fbgemm.bounds_check_indices.default


def in_place(rows: Tensor, ids: Tensor, offsets: Tensor, mode: int, count: Tensor) -> Tensor:
    CHECK(rows, ids, offsets, mode, count, None)
    return count


def functional(
    rows: Tensor, ids: Tensor, offsets: Tensor, mode: int, count: Tensor, *, is_brief: bool = False
) -> Tensor:
    others = {each.name: each.default_value for each in CHECK._schema.arguments if each.has_default_value()}
    others = {"weights": None} if is_brief else others
    places = {
        "_indices_base_index": 0,
        "_offsets_base_index": 1,
        "_warning_base_index": 2,
        "_weights_base_index": None,
    }
    others |= {"rows_per_table": rows, "bounds_check_mode": mode, **places}
    del others["weights"]
    return AUTO_FUNCTIONALIZED(CHECK, **others, _all_bases=[ids, offsets, count])[-1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", [in_place, functional, partial(functional, is_brief=True)])
def test_a_bounds_check_that_does_not_warn_leaves_the_count(check: Callable[..., Tensor]) -> None:
    warns, ignores = BoundsCheckMode.WARNING.value, BoundsCheckMode.IGNORE.value

    def is_proved(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
        def step(*modes: int) -> Callable[[Tensor], list[Tensor]]:
            def run(ids: Tensor) -> list[Tensor]:
                rows, offsets, count = torch.full((1,), 4), torch.arange(4), torch.zeros(1, dtype=torch.int64)
                for mode in modes:
                    count = check(rows, ids.clone(), offsets.clone(), mode, count)
                return [count]

            return run

        return bool(prove(*(capture(step(*modes), torch.tensor([1, 9, 2]), is_fixed=True) for modes in (one, two))))

    assert is_proved((warns, warns), (warns,))  # each writes it anew
    assert is_proved((ignores,), (ignores, ignores))
    assert not is_proved((warns, ignores), (ignores,))
