"""Wrong passes are told which value they change, and where; right ones are proved right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import fx

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import ProofError
from graphpasses.graph import WAIT, CapturedStep, TrainGraph
from graphpasses.graph.nodes import SAME_TENSOR_OPS
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.proof.steps import NUM_RANKS, RANK, calls, capture, sharded

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
REDUCE_SCATTER, ALL_GATHER = (
    collectives.reduce_scatter_tensor.default,
    collectives.all_gather_into_tensor.default,
)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with fake_process_group(NUM_RANKS, RANK):
        yield


@pytest.fixture(scope="module")
def step() -> CapturedStep:
    return capture(sharded())


@dataclass(frozen=True)
class Wrong(GraphPass):
    """Does to a graph what a function does."""

    name = "wrong"
    numerics = Numerics.BITWISE

    change: Callable[[TrainGraph], None]

    def rewrite(self, graph: TrainGraph) -> int:
        self.change(graph)
        return 1


# ---- passes that somebody may write by accident -------------------------------------------------------------------


def gradients_of_one_shape_swapped(graph: TrainGraph) -> None:
    (a,), (b,) = (graph.gradient_slots()[f"{name}.weight"] for name in ("one", "two"))
    values = graph.output_values
    graph.set_output(a, values[b])
    graph.set_output(b, values[a])


def all_gradients_one_value(graph: TrainGraph) -> None:
    (a,), (b,) = (graph.gradient_slots()[f"{name}.bias"] for name in ("one", "two"))
    graph.set_output(a, graph.output_values[b])


def loss_times_zero(graph: TrainGraph) -> None:
    loss = graph.output_values[0]
    with graph.graph.inserting_after(loss):
        graph.set_output(0, graph.emit(aten.mul.Scalar, (loss, 0), like=loss))


def loss_plus_one(graph: TrainGraph) -> None:
    loss = graph.output_values[0]
    with graph.graph.inserting_after(loss):
        graph.set_output(0, graph.emit(aten.add.Scalar, (loss, 1), like=loss))


def zeros_reduced(graph: TrainGraph) -> None:
    (reduce, *_) = calls(graph, REDUCE_SCATTER)
    sent = reduce.args[0]
    assert isinstance(sent, fx.Node)
    with graph.graph.inserting_before(reduce):
        reduce.replace_input_with(sent, graph.emit(aten.zeros_like.default, (sent,), like=reduce))


def sum_instead_of_mean(graph: TrainGraph) -> None:
    reduce = calls(graph, REDUCE_SCATTER)[0]
    reduce.args = (reduce.args[0], "sum", *reduce.args[2:])


def reduction_in_another_dtype(graph: TrainGraph) -> None:
    reduce = calls(graph, REDUCE_SCATTER)[0]
    wait = next(iter(reduce.users))
    sent = reduce.args[0]
    readers = [*wait.users]
    with graph.graph.inserting_before(reduce):
        low = graph.emit(aten._to_copy.default, (sent,), {"dtype": torch.bfloat16}, like=reduce)
        reduced = graph.emit(REDUCE_SCATTER, (low, *reduce.args[1:]), like=reduce)
        waited = graph.emit(WAIT, (reduced,), like=reduce)
        high = graph.emit(aten._to_copy.default, (waited,), {"dtype": torch.float32}, like=reduce)
    for reader in readers:
        reader.replace_input_with(wait, high)


def one_weight_for_another(graph: TrainGraph) -> None:
    found = [node for node in calls(graph, aten.t.default) if is_gathered_square(node.args[0])]
    found[1].args = found[0].args  # the weight that is there already


def is_gathered_square(value: object) -> bool:
    return isinstance(value, fx.Node) and value.target in SAME_TENSOR_OPS and tuple(value.meta["val"].shape) == (6, 6)


def gathered_parameter_zeroed(graph: TrainGraph) -> None:
    wait = next(iter(calls(graph, ALL_GATHER)[0].users))
    with graph.graph.inserting_after(wait):
        graph.emit(aten.zero_.default, (wait,), like=wait)


def launch_without_a_wait(graph: TrainGraph) -> None:
    loss = graph.output_values[0]
    with graph.graph.inserting_after(loss):
        graph.set_output(0, graph.emit(collectives.all_reduce.default, (loss, "avg", "0"), like=loss))


def buffer_written_before_it_is_read(graph: TrainGraph) -> None:
    norm = calls(graph, aten.native_batch_norm.default)[0]
    mean = norm.args[3]
    with graph.graph.inserting_before(norm):
        graph.emit(aten.add_.Tensor, (mean, 1), like=norm)


def other_random_numbers(graph: TrainGraph) -> None:
    draw = calls(graph, aten.bernoulli_.float)[0]
    with graph.graph.inserting_before(draw):
        noise = graph.emit(aten.rand.default, ([],), {"device": torch.device("cpu")}, like=draw)
        loss = graph.output_values[0]
    with graph.graph.inserting_after(loss):
        zero = graph.emit(aten.mul.Scalar, (noise, 0), like=loss)
    with graph.graph.inserting_after(zero):
        graph.set_output(0, graph.emit(aten.add.Tensor, (loss, zero), like=loss))


def numbers_drawn_after_all_others(graph: TrainGraph) -> None:
    gradient = graph.output_values[-1] or graph.output_values[0]
    with graph.graph.inserting_before(graph.graph.output_node()):
        noise = graph.emit(aten.rand.default, ([],), {"device": torch.device("cpu")}, like=gradient)
        graph.emit(aten.add_.Tensor, (noise, 1), like=gradient)


def summands_exchanged_with_another(graph: TrainGraph) -> None:
    total = next(node for node in calls(graph, aten.add.Tensor) if tuple(node.meta["val"].shape) == (6, 6))
    total.args = (total.args[0], total.args[0])


def sent_is_written_before_the_wait(graph: TrainGraph) -> None:
    reduce = calls(graph, REDUCE_SCATTER)[0]
    with graph.graph.inserting_after(reduce):
        graph.emit(aten.mul_.Scalar, (reduce.args[0], 2), like=reduce)


WRONG: dict[Callable[[TrainGraph], None], str] = {
    gradients_of_one_shape_swapped: "the gradient of '",
    all_gradients_one_value: "the gradient of 'one.bias'",
    loss_times_zero: "the loss",
    zeros_reduced: "the gradient of '",
    sum_instead_of_mean: "_c10d_functional.reduce_scatter_tensor.default is given sum instead of avg",
    reduction_in_another_dtype: "the gradient of '",
    one_weight_for_another: "the gradient of '",
    gathered_parameter_zeroed: "",
    launch_without_a_wait: "all_reduce",
    buffer_written_before_it_is_read: "buffer norm.running_mean",
    other_random_numbers: "",
    numbers_drawn_after_all_others: "the state of random numbers after the step",
    summands_exchanged_with_another: "the gradient of 'two.weight'",
    sent_is_written_before_the_wait: "",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_wrong_pass_is_refused(step: CapturedStep, change: Callable[[TrainGraph], None]) -> None:
    passes = gp.default_pipeline().passes
    with pytest.raises(gp.GraphPassesError) as caught:
        Pipeline((*passes, Wrong(change))).run(step, prove=True)
    assert str(caught.value).startswith("pass 'wrong' (after deduplicate-shared, ")
    assert WRONG[change] in str(caught.value)


def test_prove_alone_refuses_what_the_rules_let_through(step: CapturedStep) -> None:
    """Control: of the wrong passes the check between passes sees a few only."""
    seen = 0
    for change in WRONG:
        try:
            Pipeline((Wrong(change),)).run(step, prove=False)
        except gp.GraphPassesError:
            seen += 1
    assert 0 < seen <= 4


def test_error_says_what_and_where(step: CapturedStep) -> None:
    with pytest.raises(ProofError) as caught:
        Pipeline((Wrong(sum_instead_of_mean),)).run(step, prove=True)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "pass 'wrong' changes the gradient of 'embedding.weight' (and 2 others: the gradient of 'norm.weight', "
        "the gradient of 'norm.bias'): _c10d_functional.reduce_scatter_tensor.default is given sum instead of avg"
    ) or lines[0].startswith("pass 'wrong' changes the gradient of ")
    assert lines[1].startswith("  before: reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor.default(")
    assert ", avg, 4, " in lines[1]
    assert ", sum, 4, " in lines[2]


def test_default_pipeline_is_proved(step: CapturedStep) -> None:
    report = gp.default_pipeline().run(step, prove=True).report
    assert report is not None
    certificate = report.certificate
    assert certificate
    assert certificate.proved[0] == "the loss"
    assert {"buffer norm.running_mean", "buffer norm.running_var", "the gradient of 'two.weight'"} <= {
        *certificate.proved
    }
    assert "all-gather" in certificate.axioms
    assert f"{len(certificate.proved)} values proved equal in bits, 0 not proved" in str(report)
    assert len(certificate.launches) == sum(gp.default_pipeline().run(step).collectives().values())


def test_proof_is_the_default(step: CapturedStep) -> None:
    with pytest.raises(ProofError, match=r"^pass 'wrong' changes the loss"):
        Pipeline((Wrong(loss_times_zero),)).run(step)
    report = Pipeline((Wrong(loss_times_zero),)).run(step, prove=False).report
    assert report is not None
    assert report.certificate is None
    assert str(report).splitlines()[-1] == "proof: off (prove=False)"


@dataclass(frozen=True)
class Rounds(Wrong):
    """Says that it may change bits."""

    name = "rounds"
    numerics = Numerics.ROUNDING


def test_what_may_round_is_taken_as_it_is(step: CapturedStep) -> None:
    passes = gp.default_pipeline().passes
    report = Pipeline((Rounds(loss_times_zero), *passes)).run(step).report
    assert report is not None
    assert report.certificate
    assert report.proof.startswith("but for what 'rounds' did, which may round: ")
    with pytest.raises(ProofError, match=r"^pass 'wrong' changes the loss"):  # what comes after it is proved
        Pipeline((Rounds(loss_times_zero), Wrong(loss_plus_one))).run(step)
    with pytest.raises(ProofError, match=r"^pass 'wrong' changes the loss"):  # and what comes before
        Pipeline((Wrong(loss_plus_one), Rounds(loss_times_zero))).run(step)
    with pytest.raises(ProofError, match=r"^prove=True: pass 'rounds' may round; without it, or with prove=None, "):
        Pipeline((Rounds(loss_times_zero), *passes)).run(step, prove=True)


def test_strides_count(step: CapturedStep) -> None:
    """Equal elements in another layout in memory may come out with other bits."""
    rewritten = step.copy()
    product = next(node for node in calls(rewritten, aten.mm.default))
    (read, *others) = product.args
    with rewritten.graph.inserting_before(product):
        turned = rewritten.emit(aten.t.default, (read,), like=product)
        copied = rewritten.emit(
            aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}, like=product
        )
        back = rewritten.emit(aten.t.default, (copied,), like=product)
    product.args = (back, *others)
    with pytest.raises(ProofError, match=r"aten.mm.default reads a tensor of strides \(1, \d+\) instead of"):
        gp.prove(step, rewritten)


def test_moves_of_elements_are_followed(step: CapturedStep) -> None:
    """Near miss: what is cut, put together again and turned twice is what it was."""
    rewritten = step.copy()
    product, read = next(
        (node, read)
        for node in calls(rewritten, aten.mm.default)
        for read in node.all_input_nodes
        if read.meta["val"].is_contiguous()
    )
    emit = partial(rewritten.emit, like=product)
    with rewritten.graph.inserting_before(product):
        split = emit(aten.split_with_sizes.default, (read, [1, read.meta["val"].shape[1] - 1], 1))
        parts = [emit(operator.getitem, (split, index)) for index in (0, 1)]
        whole = emit(aten.cat.default, (parts, 1))
        turned = emit(aten.t.default, (emit(aten.t.default, (whole,)),))
    product.replace_input_with(read, turned)
    assert gp.prove(step, rewritten)
