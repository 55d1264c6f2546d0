"""Captured steps against eager in one process, and what capture refuses."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.capture.traced_result import read_traced_result
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.graph import InputKind, OutputKind, TrainGraph
from graphpasses.passes import CoalesceGradReductions, DeduplicateShared
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import same_bits


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))


def bits_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def assert_equal_steps(
    model: nn.Module, *, steps: int = 2, loss_fn: Callable[..., torch.Tensor] = mean_square
) -> TrainGraph:
    """Trains ``model`` captured and a copy eagerly, with the same random numbers."""
    eager = copy.deepcopy(model)
    step = capture_train_step(loss_fn, model, batch())
    processed = Pipeline((DeduplicateShared(), CoalesceGradReductions())).run(step)
    for index, graph in enumerate([step, processed] * steps):
        torch.manual_seed(index)
        loss = graph(batch(index))
        state = torch.get_rng_state()
        torch.manual_seed(index)
        expected = loss_fn(eager, batch(index))
        expected.backward()
        assert torch.equal(state, torch.get_rng_state())
        assert same_bits(loss, expected)
        for (fqn, p), q in zip(model.named_parameters(), eager.named_parameters(), strict=True):
            q = q[1]
            assert (p.grad is None) == (q.grad is None), fqn
            assert p.grad is None or same_bits(p.grad, q.grad), fqn
        for a, b in zip(bits_of(model), bits_of(eager), strict=True):
            assert same_bits(a, b)
        for m in (model, eager):
            torch.optim.AdamW(m.parameters(), 1e-2).step()
            m.zero_grad()
    return step


def test_mlp() -> None:
    assert_equal_steps(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 1)))


def test_dropout_draws_eagers_random_numbers() -> None:
    assert_equal_steps(nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.1)))


def test_batch_norm_updates_its_buffers() -> None:
    step = assert_equal_steps(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    assert step.model[1].num_batches_tracked == 4
    buffers = [item.fqn for item in step.inputs if item.kind is InputKind.BUFFER]
    assert buffers == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_capture_computes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, state = bits_of(model), torch.get_rng_state()
    capture_train_step(mean_square, model, batch())
    assert all(map(same_bits, bits_of(model), before))
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_parametrization() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    step = assert_equal_steps(model)
    assert set(step.parameters) == {
        "bias",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    }


def test_frozen_and_unused() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2)})
    model["used"].bias.requires_grad_(False)
    step = assert_equal_steps(model, loss_fn=lambda model, x: model["used"](x).square().mean())
    assert step.without_gradient == {"used.bias", "idle.weight", "idle.bias"}
    assert set(step.gradient_slots()) == {"used.weight", "idle.weight", "idle.bias"}


def test_tied_parameters_get_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    assert_equal_steps(model)


def test_module_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))

    assert_equal_steps(Twice())


def test_module_with_two_names() -> None:
    shared = nn.Linear(3, 3)
    assert_equal_steps(nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared))


def test_capture_leaves_shared_modules_alone() -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    before = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    capture_train_step(mean_square, model, batch())
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} == before


def test_failed_capture_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(7, 3))
    before = {id(tensor) for tensor in model.parameters()}
    with pytest.raises(RuntimeError):
        capture_train_step(mean_square, model, batch())
    assert {id(tensor) for tensor in model.parameters()} == before


def test_casts_are_kept_apart() -> None:
    """Each use of a weight casts it, and its gradients are added after their casts back, as in eager."""
    model = nn.Linear(3, 3, bias=False)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(x.bfloat16() @ model.weight.to(torch.bfloat16))
        return x.float().square().mean()

    assert_equal_steps(model, loss_fn=loss_fn)


def test_parameter_written_through_a_view() -> None:
    """What is read after the write must not be taken for what was read before it."""
    model = nn.Linear(3, 3, bias=False)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = x.bfloat16() @ model.weight.to(torch.bfloat16)
        with torch.no_grad():
            model.weight[:2].mul_(0.5)
        second = x.bfloat16() @ model.weight.to(torch.bfloat16)
        return (first.float() + 3 * second.float()).square().mean()

    assert_equal_steps(model, loss_fn=loss_fn)


# ---- what capture refuses --------------------------------------------------------------------------------


def refusal(loss_fn: Callable[..., Any], model: nn.Module | None = None) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_train_step(loss_fn, model or nn.Linear(3, 2), batch())
    return str(caught.value)


def test_loss_is_no_scalar() -> None:
    assert refusal(lambda model, x: model(x)) == (
        "loss_fn must return a scalar floating-point tensor, it returned shape [5, 2], torch.float32; "
        "reduce it, e.g. with .mean()"
    )
    assert refusal(lambda model, x: model(x).sum().long()).startswith(
        "loss_fn must return a scalar floating-point tensor, it returned shape [], torch.int64; "
    )


def test_loss_is_no_tensor() -> None:
    assert refusal(lambda model, x: None) == (
        "loss_fn returned a NoneType; return the loss, a scalar floating-point tensor, a tuple that begins with it, "
        "or a dict or an object that has it as its 'loss'"
    )


def test_loss_is_a_dtensor() -> None:
    from torch.distributed.tensor import DTensor, Replicate

    from graphpasses._torch.fake_process_group import fake_process_group
    from tests.helpers.models import make_mesh

    with fake_process_group(4):
        mesh = make_mesh()
        message = refusal(lambda model, x: DTensor.from_local(model(x).sum(), mesh, [Replicate()]))
    assert message == "loss_fn returned a DTensor; return this rank's loss, e.g. loss.to_local()"


def test_loss_is_detached() -> None:
    message = "the loss does not depend on any trainable parameter (under no_grad, detached, or by torch.cond?)"
    message += "; trainable: "
    assert refusal(lambda model, x: model(x).sum().detach()) == message + "weight, bias"
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert refusal(lambda model, x: x.sum(), model) == message + "0.weight, 0.bias, 1.weight, …"


def test_no_trainable_parameter() -> None:
    message = "the model has no trainable parameter: nothing to differentiate"
    assert refusal(mean_square, nn.ReLU()) == message
    assert refusal(mean_square, nn.Linear(3, 2).requires_grad_(False)) == message


def test_model_on_meta() -> None:
    end = " is on the meta device; materialise the model (to_empty, then initialise it) before capturing its step"
    assert refusal(mean_square, nn.Linear(3, 2, device="meta")) == "parameter or buffer 'weight'" + end
    model = nn.Linear(3, 2)
    model.register_buffer("scale", torch.ones(2, device="meta"))
    assert refusal(mean_square, model) == "parameter or buffer 'scale'" + end


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module() -> None:
    message = "parameter 'weight' is of a lazy module, and has no shape yet; run the model once before"
    assert refusal(mean_square, nn.LazyLinear(2)) == message


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_a_quantized_buffer() -> None:
    (model := nn.Linear(3, 2)).register_buffer("scale", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    message = "parameter or buffer 'scale' is a quantized tensor, which cannot be traced; keep a plain one"
    assert refusal(mean_square, model) == message


def test_buffer_on_meta_that_is_not_saved() -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)
    assert refusal(lambda model, x: (model(x) * model.scale).sum(), model).startswith(
        "parameter or buffer 'scale' is on the meta device; "
    )


def backward_itself(retain_graph: bool) -> Callable[..., torch.Tensor]:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward(retain_graph=retain_graph)
        return loss

    return loss_fn


def test_loss_fn_calls_backward() -> None:
    message = (
        "loss_fn called backward itself; return the loss and let the capture differentiate it "
        "(a loss that runs backward chunk by chunk cannot be captured: sum the chunks' losses)"
    )
    assert refusal(backward_itself(retain_graph=False)) == message


def test_loss_fn_calls_backward_and_retains_the_graph() -> None:
    """In eager its gradients come on top of those of the returned loss."""
    assert refusal(backward_itself(retain_graph=True)).startswith("loss_fn called backward itself; ")


def test_loss_fn_runs_backward_chunk_by_chunk() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for chunk in x.chunk(2):
            loss = model(chunk).square().mean()
            loss.backward()
            total += loss.detach()
        return total

    assert refusal(loss_fn).startswith("loss_fn called backward itself; ")


def test_a_buffer_that_the_loss_makes() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.register_buffer("late", torch.ones(()))
        return mean_square(model, x)

    assert refusal(loss_fn) == (
        "loss_fn makes or removes 'late', a parameter or buffer, and a captured step would not. If it does so at "
        "the first call only, run loss_fn once before the capture"
    )


def test_error_of_the_loss_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        capture_train_step(mean_square, nn.Linear(7, 2), batch())


def test_batch_of_subclasses_is_refused() -> None:
    from torch.distributed.tensor import DTensor, Replicate

    from graphpasses._torch.fake_process_group import fake_process_group
    from tests.helpers.models import make_mesh

    with fake_process_group(4):
        x = DTensor.from_local(batch(), make_mesh(), [Replicate()])
        with pytest.raises(
            BatchMismatchError, match=r"^batch\[0\] is a DTensor, a tensor subclass; pass plain tensors"
        ):
            capture_train_step(lambda model, x: model(x.to_local()).sum(), nn.Linear(3, 2), x)


def test_torchtitan_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan.experiments.graph_trainer.make_fx_tracer", None)
    step = capture_train_step(mean_square, nn.Linear(3, 2), batch())
    assert step.gradient_slots() == {"weight": [1], "bias": [2]}


# ---- a step that graph_trainer traced --------------------------------------------------------------------


def traced(model: nn.Module, outputs: Callable[..., list[torch.Tensor]]) -> Any:
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        loss = mean_square(model, x)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return outputs(loss, torch.autograd.grad(loss, parameters))

    return minimal_fx_tracer(fn, module=model)(batch())


def test_read_traced_result() -> None:
    model = nn.Linear(3, 2)
    result = traced(model, lambda loss, gradients: [loss, *gradients])
    step = read_traced_result(result, model=model)
    assert step.module is result.gm
    assert step.fixed_signature
    assert [item.fqn for item in step.inputs] == ["weight", "bias", "batch leaf 0"]
    expected = mean_square(model, batch())
    assert same_bits(step(batch()), expected)
    assert all(
        map(
            same_bits,
            [p.grad for p in model.parameters()],
            torch.autograd.grad(expected, list(model.parameters())),
        )
    )


def test_read_traced_result_whose_loss_is_a_dtensor() -> None:
    """torchtitan's chunked loss is one under tensor parallelism."""
    with fake_process_group(2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        result = traced(
            nn.Linear(3, 2),
            lambda loss, gradients: [DTensor.from_local(loss.detach(), mesh, [Replicate()]), *gradients],
        )
        step = read_traced_result(result, model=nn.Linear(3, 2))
    assert [(item.kind, item.attr, item.is_loss) for item in step.outputs[:3]] == [
        (OutputKind.LOSS, "_local_tensor", True),
        (OutputKind.LOSS, "device_mesh", False),
        (OutputKind.GRADIENT, "", False),
    ]


def test_read_traced_result_without_gradients() -> None:
    model = nn.Linear(3, 2)
    result = traced(model, lambda loss, gradients: [loss, gradients[0]])
    with pytest.raises(CaptureError) as caught:
        read_traced_result(result, model=model)
    assert str(caught.value) == (
        "the traced step returns 2 values; expected the loss and one gradient for each of the 2 trainable "
        "parameters (names of tied ones counted each)"
    )


def test_read_traced_result_of_another_model() -> None:
    result = traced(nn.Linear(3, 2), lambda loss, gradients: [loss, *gradients])
    with pytest.raises(CaptureError, match=r"^the model has no parameter or buffer 'weight' any more"):
        read_traced_result(result, model=nn.Sequential(nn.Linear(3, 2)))
