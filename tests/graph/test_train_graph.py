"""A captured step as a function on the live model: batches, gradients, and what passes may ask of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.graph import GraphInput, GraphOutput, InputKind, OutputKind, TrainGraph
from graphpasses.graph.parameters import get_state
from graphpasses.passes import DeduplicateShared
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import LanguageModel, next_token_loss, on_fake_ranks, same_bits, token_batch

aten = torch.ops.aten


class Pair(nn.Module):
    """Two vectors, the second of which no loss below reads unless it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.b = nn.Parameter(torch.ones(3))


def nested_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    x = batch["features"]["dense"] * batch["scale"]
    for extra in batch["features"]["extras"]:
        x = x + extra
    return model(x).square().mean() if batch["squared"] else model(x).mean()


def nested_batch(seed: int = 0) -> dict[str, Any]:
    dense, one, two = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(seed))
    return {"features": {"dense": dense, "extras": [one, two]}, "scale": 0.5, "squared": True, "tag": None}


@pytest.fixture
def step() -> TrainGraph:
    torch.manual_seed(0)
    return capture_train_step(nested_loss, nn.Linear(3, 2), nested_batch(), recapture=False)


def eager_gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_runs_as_eager(step: TrainGraph) -> None:
    eager = copy.deepcopy(step.model)
    loss = step(nested_batch(1))
    expected = nested_loss(eager, nested_batch(1))
    assert same_bits(loss, expected)
    assert not loss.requires_grad
    for p, gradient in zip(step.model.parameters(), eager_gradients(expected, eager), strict=True):
        assert same_bits(p.grad, gradient)


def test_gradients_accumulate(step: TrainGraph) -> None:
    eager = copy.deepcopy(step.model)
    for seed in range(3):
        step(nested_batch(seed))
        nested_loss(eager, nested_batch(seed)).backward()
    for p, q in zip(step.model.parameters(), eager.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)


def test_gradients_accumulate_in_place(step: TrainGraph) -> None:
    step(nested_batch())
    kept = step.model.weight.grad
    step(nested_batch())
    assert step.model.weight.grad is kept


def test_follows_the_live_weights(step: TrainGraph) -> None:
    before = step(nested_batch())
    with torch.no_grad():
        step.model.weight.mul_(2)
    after = step(nested_batch())
    assert not same_bits(before, after)
    assert same_bits(after, nested_loss(step.model, nested_batch()))
    step.model.weight = nn.Parameter(torch.zeros(2, 3))  # another tensor of the same name
    assert same_bits(step(nested_batch()), nested_loss(step.model, nested_batch()))


def test_leaves_untouched_parameters_without_gradient() -> None:
    model = Pair()
    step = capture_train_step(lambda model, x: (model.a * x).sum(), model, torch.ones(3), recapture=False)
    assert step.without_gradient == {"b"}
    step(torch.ones(3))
    assert model.b.grad is None


def test_gradients_of_one_node_are_separate_tensors() -> None:
    """Both gradients are one value; clipping or accumulating must not see it twice."""
    model = Pair()
    step = capture_train_step(lambda model, x: ((model.a + model.b) * x).sum(), model, torch.ones(3), recapture=False)
    x = torch.tensor([1.0, 2.0, 3.0])
    step(x)
    step(x)
    assert model.a.grad.tolist() == model.b.grad.tolist() == (2 * x).tolist()


VIEWS: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "two": lambda model: model.a.view(1, 3) + model.b.view(1, 3),
    "one": lambda model: model.a.view(1, 3) + model.b,
    "of a view": lambda model: model.a.view(1, 3) + model.b.view(3, 1).t().view(1, 3),
}


@pytest.mark.parametrize("add", VIEWS.values(), ids=[*VIEWS])
def test_gradients_that_are_views_of_one_tensor(add: Callable[[nn.Module], torch.Tensor]) -> None:
    """Eager adds to both what it adds to either, and clips both twice, if both are views."""
    model, eager, x = Pair(), Pair(), torch.tensor([1.0, 2.0, 3.0])
    step = capture_train_step(lambda model, x: (add(model) * x).sum(), model, x, recapture=False)
    for _ in range(2):
        step(x)
        (add(eager) * x).sum().backward()
    for each in (model, eager):
        nn.utils.clip_grad_norm_(each.parameters(), 1.0)
    for name in ("a", "b"):
        assert same_bits(getattr(model, name).grad, getattr(eager, name).grad)


class ReturnsItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0].mul_(gradient), None


def test_a_gradient_that_the_batch_holds() -> None:
    model, x = Pair(), torch.ones(3)
    step = capture_train_step(lambda model, x: ReturnsItsInput.apply(model.a, x), model, x, recapture=False)
    step(x)
    model.a.grad.zero_()
    assert x.tolist() == [1.0] * 3


def test_expanded_gradient_accumulates() -> None:
    """The gradient of a sum is one element seen many times; eager's ``.grad`` owns its elements."""
    model, eager = Pair(), Pair()
    step = capture_train_step(lambda model: (model.a * 1).sum() + model.b.sum(), model, recapture=False)
    for _ in range(2):
        step()
        ((eager.a * 1).sum() + eager.b.sum()).backward()
    assert model.b.grad.tolist() == eager.b.grad.tolist() == [2.0] * 3


def test_gradient_has_the_strides_of_eagers() -> None:
    """Norms and fused optimizers walk memory, so a transposed gradient may round differently."""
    model = nn.Linear(3, 2, bias=False)
    eager = copy.deepcopy(model)
    x = torch.randn(3, 2)
    capture_train_step(lambda model, x: (model.weight.t() * x).sum(), model, x, recapture=False)(x)
    (eager.weight.t() * x).sum().backward()
    assert same_bits(model.weight.grad, eager.weight.grad)
    assert model.weight.grad.stride() == eager.weight.grad.stride() == (3, 1)


def test_autocast_around_the_call(step: TrainGraph) -> None:
    """Eager would cast; the graph of a step that was captured without autocast does not."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError) as caught:
        step(nested_batch())
    assert str(caught.value) == (
        "autocast on 'cpu' was None when the step was captured, and is torch.bfloat16 now; capture the step again, "
        "or undo the change"
    )


# ---- batches that do not fit -----------------------------------------------------------------------------


def mismatch(step: TrainGraph, *batch: Any) -> str:
    with pytest.raises(BatchMismatchError) as caught:
        step(*batch)
    assert all(p.grad is None for p in step.model.parameters())
    return str(caught.value)


def changed(**values: Any) -> dict[str, Any]:
    batch = nested_batch()
    batch["features"].update({k: values.pop(k) for k in list(values) if k in batch["features"]})
    return batch | values


def test_shape(step: TrainGraph) -> None:
    assert mismatch(step, changed(dense=torch.ones(5, 3))) == (
        "batch[0]['features']['dense'] differs from the captured batch: "
        "expected shape [4, 3], torch.float32, on cpu, got shape [5, 3], torch.float32, on cpu. "
        "Capture a step for it, pad the batch, or name the dims that vary in capture_train_step's dynamic_shapes"
    )


def test_dtype(step: TrainGraph) -> None:
    extras = [torch.ones(4, 3), torch.ones(4, 3, dtype=torch.float64)]
    assert mismatch(step, changed(extras=extras)) == (
        "batch[0]['features']['extras'][1] differs from the captured batch: "
        "expected shape [4, 3], torch.float32, on cpu, got shape [4, 3], torch.float64, on cpu. "
        "Capture a step for it, or convert it, with .to('cpu', torch.float32)"
    )


def test_device(step: TrainGraph) -> None:
    assert "got shape [4, 3], torch.float32, on meta" in mismatch(
        step, changed(dense=torch.ones(4, 3, device="meta"))
    )


def test_plain_values(step: TrainGraph) -> None:
    for values, leaf, expected, got in (
        ({"scale": "0.25"}, "scale", "0.5", "'0.25'"),
        ({"squared": False}, "squared", "True", "False"),
        ({"squared": 1}, "squared", "True", "1"),
        ({"scale": torch.tensor(0.5)}, "scale", "0.5", "shape [], torch.float32, on cpu"),
    ):
        is_text = isinstance(values[leaf], str)
        other = ", or leave a text that varies, as a file's name, out of the batch" if is_text else ""
        assert mismatch(step, changed(**values)) == (
            f"batch[0]['{leaf}'] differs from the captured batch: expected {expected}, got {got}. "
            f"Capture a step for it{other}"
        )


def test_plain_value_for_a_tensor(step: TrainGraph) -> None:
    assert mismatch(step, changed(dense=1.0)).startswith(
        "batch[0]['features']['dense'] differs from the captured batch: "
        "expected shape [4, 3], torch.float32, on cpu, got 1.0. "
    )


def test_structure(step: TrainGraph) -> None:
    for batch, difference in (
        ((), "batch lacks [0]"),
        ((nested_batch(), 1), "batch has [1] beside what the captured batch had"),
        (
            (changed(extras=[torch.ones(4, 3)]),),
            "batch[0]['features']['extras'] lacks [1]",
        ),
        ((nested_batch() | {"more": 1},), "batch[0] has ['more'] beside what the captured batch had"),
    ):
        assert mismatch(step, *batch) == f"{difference}; capture a step for this structure"


def test_strides() -> None:
    """A transposed batch would be read by views that were traced for a contiguous one."""
    step = capture_train_step(
        lambda model, x: model(x).square().mean(), nn.Linear(3, 2), torch.ones(4, 2, 3), recapture=False
    )
    with pytest.raises(BatchMismatchError, match=r"^batch\[0\] differs from the captured batch: "):
        step(torch.ones(2, 4, 3).transpose(0, 1))


def test_numbers_equal_by_value_but_not_identity(step: TrainGraph) -> None:
    step(changed(scale=float("0.5")))


def test_vanished_parameter(step: TrainGraph) -> None:
    del step.model.bias
    step.model.register_parameter("bias", None)
    with pytest.raises(CaptureError) as caught:
        step(nested_batch())
    assert str(caught.value) == (
        "the model has no parameter or buffer 'bias' any more; the captured step reads it. "
        "Capture the step again after changing the model"
    )


# ---- what passes ask -------------------------------------------------------------------------------------


def test_inputs_and_outputs(step: TrainGraph) -> None:
    assert step.inputs == (
        GraphInput(InputKind.PARAMETER, "weight"),
        GraphInput(InputKind.PARAMETER, "bias"),
        GraphInput(InputKind.BATCH, "batch[0]['features']['dense']"),
        GraphInput(InputKind.BATCH, "batch[0]['features']['extras'][0]"),
        GraphInput(InputKind.BATCH, "batch[0]['features']['extras'][1]"),
        GraphInput(InputKind.BATCH, "batch[0]['scale']"),
        GraphInput(InputKind.BATCH, "batch[0]['squared']"),
        GraphInput(InputKind.BATCH, "batch[0]['tag']"),
    )
    assert step.outputs == (
        GraphOutput(OutputKind.LOSS),
        GraphOutput(OutputKind.GRADIENT, "weight"),
        GraphOutput(OutputKind.GRADIENT, "bias"),
    )
    assert step.gradient_slots() == {"weight": [1], "bias": [2]}
    assert [fqn for fqn, _ in step.parameter_placeholders()] == ["weight", "bias"]
    assert step.without_gradient == frozenset()
    assert step.collectives() == {}
    assert not step.fixed_signature


def test_parameters_are_described_alike_on_every_rank() -> None:
    described = []
    for rank in (0, 3):
        with on_fake_ranks(LanguageModel(), rank=rank) as step:
            described.append(step.parameters)
            assert step.gradient_slots()["emb.weight"] == [1, 35]
    assert described[0] == described[1]
    info = described[0]["layers.0.gain"]
    assert (info.shape, info.dtype, info.shard_dim, info.shard_ranks) == (
        (3,),
        torch.float32,
        0,
        (0, 1, 2, 3),
    )
    assert "head.weight" not in described[0]


def test_hybrid_shard_ranks() -> None:
    ranks = []
    for rank in (0, 3):
        with on_fake_ranks(LanguageModel(), rank=rank, hybrid=True) as step:
            info = step.parameters["norm.weight"]
            ranks.append((info.shard_ranks, info.replicate_ranks))
    assert ranks == [((0, 1), (0, 2)), ((2, 3), (1, 3))]


def test_emit_fills_in_value_and_origin(step: TrainGraph) -> None:
    graph = step.copy()
    like = graph.graph.find_nodes(op="call_function", target=aten.addmm.default)[0]
    with graph.graph.inserting_before(like.next):
        node = graph.emit(aten.sum.dim_IntList, (like, [0]), {"keepdim": True}, like=like)
    assert node.meta["val"].shape == (1, 2)
    assert node.kwargs == {"keepdim": True}
    assert node.meta["stack_trace"] == like.meta["stack_trace"]


def test_copy_is_independent(step: TrainGraph) -> None:
    code = step.module.code
    other = step.copy()
    assert other.module.code == code
    assert other.model is step.model
    other.note("mine")
    other.set_output(0, None)
    for node in other.graph.nodes:
        node.meta.clear()
    other.module.recompile()
    assert step.notes == []
    assert step.module.code == code
    assert all("val" in node.meta for node in step.graph.nodes if node.op == "call_function")


def test_remove_inputs() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    step = capture_train_step(
        lambda model, x: model["b"](model["a"](x)).sum(), model, torch.ones(2, 3), recapture=False
    )
    assert [item.fqn for item in step.inputs[:4]] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    graph = Pipeline((DeduplicateShared(),)).run(step)
    assert [item.fqn for item in graph.inputs[:3]] == ["a.weight", "a.bias", "b.bias"]
    assert len(graph.placeholders) == len(graph.inputs)


def test_find_state_looks_past_simple_fsdp() -> None:
    with on_fake_ranks(LanguageModel()) as step:
        model = step.model
        assert type(get_state(model, "layers.0.gain")).__name__ == "DTensor"
        assert get_state(model, "head.weight") is get_state(model, "emb.weight")
        with pytest.raises(CaptureError, match=r"^the model has no parameter or buffer 'layers\.7\.gain' any more"):
            get_state(model, "layers.7.gain")


def test_plain_tied_language_model_equals_eager() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    eager = copy.deepcopy(model)
    step = capture_train_step(next_token_loss, model, *token_batch(), recapture=False)
    expected = next_token_loss(eager, *token_batch(1))
    expected.backward()
    assert same_bits(step(*token_batch(1)), expected)
    for (fqn, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert same_bits(p.grad, q.grad), fqn


def test_outputs_are_replaced_all_at_once(step: TrainGraph) -> None:
    values = step.output_values
    with step.graph.inserting_before(step.graph.output_node()):
        news = {old: step.graph.call_function(aten.neg.default, (old,)) for old in values[1:]}
    step.replace_outputs(news)
    assert step.output_values == [values[0], *news.values()]
    step.replace_outputs({})
    assert step.output_values == [values[0], *news.values()]
    assert all(list(old.users) == [new] for old, new in news.items())
