"""What a ``loss_fn`` returns, and the model's tensors that it reads otherwise than from the model."""

from __future__ import annotations

import math
import random
from collections import namedtuple
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_flatten

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.identity import same_bits

X = torch.ones(2, 4)


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@dataclass
class ModelOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


Pair = namedtuple("Pair", ["total", "logits"])


def flattened(result: Any) -> tuple[list[Any], Any]:
    return tree_flatten(vars(result) if isinstance(result, ModelOutput) else result)


@pytest.mark.parametrize(
    "wrap",
    [
        ModelOutput,
        Pair,
        lambda loss, logits: [loss, {"accuracy": (logits > 0).float().mean(), "num": 2}, None],
        lambda loss, logits: (loss, 2 * loss.item(), (logits > 0).sum().item()),
        lambda loss, logits: {"logits": logits, "loss": loss, "log": {"loss": loss}},
        lambda loss, logits: {"log": {"loss": loss}, "loss": loss},
        lambda loss, logits: (loss, logits.shape, torch.complex(logits, logits).conj()),
    ],
)
def test_results_that_hold_a_loss(wrap: Callable[..., Any]) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        logits = model(x)
        return wrap(logits.mean(), logits)

    model, x = nn.Linear(4, 2), torch.randn(2, 4)
    step = capture_train_step(loss_fn, model, X)
    result, expected = step(x), loss_fn(model, x)
    assert type(result) is type(expected)
    (leaves, spec), (theirs, expected_spec), (others, _) = map(flattened, (result, expected, loss_fn(model, X)))
    assert spec == expected_spec
    for ours, other in zip(leaves, theirs, strict=True):
        assert (
            (same_bits(ours, other.detach()) and not ours.requires_grad) if torch.is_tensor(other) else ours == other
        )
    assert not same_bits(leaves[0], others[0].detach())
    step.check(x)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (
            lambda loss, logits: (logits, loss),
            "loss_fn must return a scalar floating-point tensor, it returned shape",
        ),
        (lambda loss, logits: ModelOutput(None, logits), "loss_fn returned a ModelOutput; return the loss, a scalar"),
        (lambda loss, logits: {"logits": logits}, "loss_fn returned a dict; return the loss, a scalar"),
        (lambda loss, logits: (loss, [object()]), "result[1][0] is a object; a captured step returns tensors"),
        (lambda loss, logits: (loss, logits.to_sparse()), "loss_fn returns result[1], a sparse tensor; return it"),
        (lambda loss, logits: (loss, f"{loss.item():.2f}"), "loss_fn reads a number of a tensor, as by .item(), and"),
        (lambda loss, logits: (loss, {logits.argmax().item(): 1}), "loss_fn reads a number of a tensor, as by .item"),
    ],
)
def test_results_that_no_step_returns(wrap: Callable[..., Any], message: str) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        logits = model(x)
        return wrap(logits.mean(), logits)

    assert refusal_of(lambda: capture_train_step(loss_fn, nn.Linear(4, 2), X)).startswith(message)


def test_a_text_that_depends_on_a_number() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> Any:
        loss = model(x).mean()
        return loss, type(loss.item()).__name__

    with pytest.raises(
        FidelityError, match=r"another result\[1\].* no tensor and no number: it is built in as it was traced"
    ):
        capture_train_step(loss_fn, nn.Linear(4, 2), X)


@pytest.mark.parametrize(
    ("use", "refusal"),
    [
        (print, r"makes the text of a tensor at .*test_loss\.py:\d+ in loss_fn, as print\(x\)"),
        ("{:.3f}".format, "makes the text of a tensor"),
        (lambda loss: f"{loss}", "makes the text of a tensor"),
        (lambda loss: str(loss.item()), "makes the text of a number of a tensor"),
        (lambda loss: print(loss.item()), "makes the text of a number of a tensor"),
        (lambda loss: {f"top {loss.item() + 1}": 1}, "makes the text of a number of a tensor"),
        (lambda loss: f"{loss.item():.3f}", r"reads a number of a tensor, .* Return it, and do so after the step"),
        (lambda loss: np.isnan(loss.item()), "reads a number of a tensor, .* or gives it to code in C"),
        (lambda loss: random.Random(loss.item()), r"decides by a tensor's value .* at \S*test_loss\.py"),
        (
            lambda loss: math.isfinite(loss.item()),
            r"decides .* `if not torch\.isfinite\(x\): raise \.\.\.` for math",
        ),
    ],
)
def test_texts_of_the_loss_and_numbers_given_to_code_in_c(use: Callable[[Any], object], refusal: str) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        use(loss)
        return loss

    with pytest.raises(CaptureError, match=f"^loss_fn {refusal}"):
        capture_train_step(loss_fn, nn.Linear(4, 2), X)


def of_one_number(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum() + torch.zeros(1)  # a regularisation that begins with torch.zeros(1)


def test_a_loss_of_any_shape_with_one_number() -> None:
    model, eager = nn.Linear(4, 2), nn.Linear(4, 2)
    eager.load_state_dict(model.state_dict())
    loss, expected = capture_train_step(of_one_number, model, X)(X), of_one_number(eager, X)
    expected.backward()
    assert torch.equal(loss, expected)
    assert loss.shape == (1,)
    assert same_bits(gradient(model.weight), gradient(eager.weight))
    assert not same_bits(gradient(model.weight), 2 * gradient(eager.weight))


class Regularised(nn.Module):
    """Holds its parameters in a list, too, as DeepCTR's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.regularised = [(list(self.linear.parameters()), 0.1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(weight * each.square().sum() for of, weight in self.regularised for each in of)
        return self.linear(x).sum() + penalty


def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    return loss


def test_parameters_that_a_list_holds() -> None:
    model = Regularised()
    eager = deepcopy(model)
    step = capture_train_step(forward, model, X)
    step(X)
    assert type(model.linear.weight) is nn.Parameter
    eager(X).backward()
    assert same_bits(gradient(model.linear.weight), gradient(eager.linear.weight))
    assert not same_bits(gradient(model.linear.weight), X.sum(0).expand(2, 4).clone())  # of the linear alone
    with pytest.raises(
        CaptureError, match=r"'linear\.weight' is this model's, and loss_fn also reads it by a variable"
    ):
        step.for_model(eager)
    model.linear.weight = nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(CaptureError, match="loss_fn reads a trainable tensor of shape"):
        step(X)


def test_a_parameter_that_loss_fn_holds_itself() -> None:
    model = nn.Linear(4, 2)
    weight = model.weight
    capture_train_step(lambda model, x: model(x).sum() + weight.square().sum(), model, X)(X)
    assert same_bits(gradient(weight), (X.sum(0).expand(2, 4) + 2 * weight).detach())


def test_a_sharded_parameter_that_loss_fn_holds_itself() -> None:
    with fake_process_group(2):
        model = fully_shard(nn.Linear(4, 2), mesh=dist.init_device_mesh("cpu", (2,)))
        weight = model.weight
        with pytest.raises(CaptureError, match=r"loss_fn reads memory of 'weight' by a tensor of its own"):
            capture_train_step(lambda model, x: model(x).sum() + weight.to_local().sum(), model, X, check=False)


def test_a_view_of_a_parameter_that_loss_fn_holds_itself() -> None:
    model = nn.Linear(4, 2)
    weight = model.weight.detach()[:1]
    with pytest.raises(CaptureError) as caught:
        capture_train_step(lambda model, x: model(x).sum() + weight.square().sum(), model, X)
    assert str(caught.value) == (
        "loss_fn reads memory of 'weight' by a tensor of its own, as a view, or a shard, that was made outside: a "
        "captured step would compute no gradient by it, nor know when it changes. Make it in loss_fn, of the "
        "parameters of the model that loss_fn is given"
    )


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(CaptureError) as caught:
        call()
    return str(caught.value)


def spectrum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.fft.fft(model(x).view(-1, 2, 2))).square().mean()


def by_numpy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum() * float(x.numpy().max())


def test_what_torch_cannot_trace() -> None:
    model = nn.Linear(4, 4)
    assert capture_train_step(spectrum, model, X)(X).isfinite()
    varying = ({0: torch.export.Dim.DYNAMIC},)
    capture_train_step(spectrum, model, X, dynamic_shapes=varying).check(torch.cat([X, X]))
    assert refusal_of(lambda: capture_train_step(by_numpy, model, X)).endswith(
        " in by_numpy by NumPy, and there are none while a step is traced. Compute with torch instead, or outside, "
        "and give the result in the batch; or in an operator of your own (torch.library.custom_op), which the step "
        "calls"
    )


@torch.library.custom_op("graphpasses_tests::ranks", mutates_args=())
def ranks_by_numpy(x: torch.Tensor) -> torch.Tensor:
    """As the matching of DETR's loss, which SciPy computes."""
    return torch.from_numpy(np.argsort(x.numpy(), axis=1))


ranks_by_numpy.register_fake(lambda x: x.new_empty(x.shape, dtype=torch.int64))


def test_an_operator_that_computes_by_numpy() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y.gather(1, ranks_by_numpy(y.detach())) * torch.arange(4)).sum()

    model = nn.Linear(4, 4)
    step = capture_train_step(loss_fn, model, X)
    for x in (X, -X):
        assert torch.equal(step(x), loss_fn(model, x))


def test_a_target_network_that_is_read_without_gradients() -> None:
    """As those of DQN and its kin: trainable, no part of the model, and copied from it now and then."""
    model, target = nn.Linear(4, 3), nn.Linear(4, 3)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            best = target(x).amax(1)
        return (model(x).amax(1) - best).square().mean()

    step = capture_train_step(loss_fn, model, X, recapture=False)
    target.load_state_dict(model.state_dict())
    model.weight.data += 1
    loss = step(X)
    got = gradient(model.weight).clone()
    model.zero_grad()
    loss_fn(model, X).backward()
    assert same_bits(loss, loss_fn(model, X).detach())
    assert same_bits(got, gradient(model.weight))
    assert target.weight.grad is None


class Recomputed(torch.autograd.Function):
    """Calls a network, and runs backward of it in its own backward, which fills the network's gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.net = net
        return net(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.net(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def test_a_network_from_outside_whose_gradients_a_backward_fills() -> None:
    model, net = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"trainable tensor of shape \[4, 4\]"):
        capture_train_step(lambda model, x: Recomputed.apply(model(x), net).sum(), model, X)
    assert net.weight.grad is None
