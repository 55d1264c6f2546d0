"""Where gradients wait between microbatches, and what a captured step refuses; bits are compared on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.fsdp2_accumulation import pending_gradients
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.errors import CaptureError
from graphpasses.graph.accumulation import Waiting
from tests.helpers.models import same_bits

X = torch.ones(2, 4)
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sharded(policy: MixedPrecisionPolicy = MIXED) -> FSDPModule:
    model = build()
    fully_shard(model[0], mesh=dist.init_device_mesh("cpu", (2,)), mp_policy=policy)
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)), mp_policy=policy)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(CaptureError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("policy", [MIXED, MixedPrecisionPolicy(torch.bfloat16), MixedPrecisionPolicy()])
def test_gradients_wait_where_eager_leaves_them(policy: MixedPrecisionPolicy) -> None:
    with fake_process_group(2):
        step = capture_train_step(loss_fn, model := sharded(policy), X)
        step.accumulate(X)
        step.accumulate(-X)
        ours = pending_gradients(step.model)
        assert all(parameter.grad is None for parameter in model.parameters())
        for module in (model[0], model):
            for parameter in fully_shard.state(module)._fsdp_param_groups[0].fsdp_params:
                leaf = parameter._unsharded_param
                assert parameter.all_gather_outputs[0].untyped_storage().nbytes() == 0  # no memory but the gradients'
                is_beside = policy is MIXED and "unsharded_accumulated_grad" in vars(parameter)  # up to torch 2.14
                assert (leaf.grad is None) == is_beside
        eager = sharded(policy)
        eager.set_requires_gradient_sync(False)
        for x in (X, -X):
            loss_fn(eager, x).backward()
        theirs = pending_gradients(eager)
        assert ours.keys() == theirs.keys()
        assert all(same_bits(ours[fqn], theirs[fqn]) for fqn in theirs)  # dtypes, too
        loss_fn(eager, X).backward()
        assert not all(same_bits(ours[fqn], each) for fqn, each in pending_gradients(eager).items())


def test_nothing_is_reduced_until_the_last() -> None:
    with fake_process_group(2):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters())
        step = capture_train_step(loss_fn, model, X, optimizer=optimizer)
        before = [each.to_local().clone() for each in model.parameters()]
        step.accumulate(X)
        everything = tuple(sorted(fqn for fqn, _ in model.named_parameters()))
        assert step.cut_steps.fitting(step, Waiting(kept=everything)).collectives() == {"all_gather_into_tensor": 2}
        assert step.collectives() == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}  # control
        assert all(same_bits(each.to_local(), b) for each, b in zip(model.parameters(), before, strict=True))
        step(X)
        assert not pending_gradients(step.model)
        assert not any(same_bits(each.to_local(), b) for each, b in zip(model.parameters(), before, strict=True))


def test_a_capture_leaves_alone_what_waits() -> None:
    with fake_process_group(2):
        model = sharded()
        model.set_requires_gradient_sync(False)
        loss_fn(model, X).backward()
        before = {fqn: each.clone() for fqn, each in pending_gradients(model).items()}
        step = capture_train_step(loss_fn, model, X)
        assert "reduce_scatter_tensor" in step.collectives()
        now = pending_gradients(model)
        assert before.keys() == now.keys()
        assert all(same_bits(now[fqn], before[fqn]) for fqn in before)


def test_half_a_step_is_not_updated() -> None:
    with fake_process_group(2):
        model = sharded()
        step = capture_train_step(loss_fn, model, X, optimizer=torch.optim.SGD(model.parameters()))
        model.set_requires_gradient_sync(False, recurse=False)
        assert refused(lambda: step(X)) == (
            "the gradient of '2.bias' is to wait (set_requires_gradient_sync(False)), and that of '0.bias' is not. "
            "Set it for the whole model: the step updates both. Or capture without optimizer="
        )
        capture_train_step(loss_fn, model, X)(X)
        assert pending_gradients(model).keys() == {"2.weight", "2.bias"}


def test_what_is_left_unsharded_is_not_clipped() -> None:
    with fake_process_group(2):
        model = sharded()
        step = capture_train_step(loss_fn, model, X, optimizer=torch.optim.SGD(model.parameters()), clip_norm=1.0)
        model.set_reshard_after_backward(False)
        assert refused(lambda: step(X)) == (
            "set_reshard_after_backward(False) leaves parameters unsharded after backward, of which eager's "
            "clip_grad_norm_ finds no gradients, and clips none. Set it to True before the step that updates"
        )
        step.accumulate(X)
        model.set_reshard_after_backward(True)
        step(X)


def test_a_parameter_that_fsdp2_ignores_is_not_updated_by_half() -> None:
    with fake_process_group(2):
        model = build()
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)), ignored_params=set(model[2].parameters()))
        step = capture_train_step(loss_fn, model, X, optimizer=torch.optim.SGD(model.parameters()))
        assert refused(lambda: step.accumulate(X)) == (
            "the gradient of '0.bias' is to wait (set_requires_gradient_sync(False)), and that of '2.bias' is in no "
            "FSDP2 group, and cannot wait there: the step updates both. Or capture without optimizer="
        )


class Halves(nn.Module):
    """Runs one of its layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.one(self.other(x)) if both else self.one(x)


def loss_of_halves(model: nn.Module, x: torch.Tensor, both: bool) -> torch.Tensor:
    return model(x, both).square().mean()


def test_a_gradient_that_the_step_does_not_have() -> None:
    with fake_process_group(2):
        model = fully_shard(Halves(), mesh=dist.init_device_mesh("cpu", (2,)))
        step = capture_train_step(loss_of_halves, model, X, False)
        model.set_requires_gradient_sync(False)
        loss_of_halves(model, X, True).backward()
        model.set_requires_gradient_sync(True)
        assert refused(lambda: step(X, False)) == (
            "FSDP2 holds a gradient of 'other.weight' that waits to be reduced, and the captured step computes none "
            "with which eager would reduce it. Run the last microbatch eagerly"
        )


@pytest.mark.skipif(RELEASE < (2, 15), reason="FSDP2 of this torch adds packed gradients as they lie")
def test_packed_gradients_of_other_parameters() -> None:
    def hybrid() -> FSDPModule:
        torch.manual_seed(0)
        return fully_shard(Halves(), mesh=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))

    def wait(model: FSDPModule, both: bool) -> None:
        model.set_requires_all_reduce(False)
        loss_of_halves(model, X, both).backward()
        model.set_requires_all_reduce(True)

    with fake_process_group(4):
        model = hybrid()
        step = capture_train_step(loss_of_halves, model, X, False)
        wait(model, True)
        assert refused(lambda: step(X, False)) == (
            "FSDP2 holds a gradient of 'other.bias' that waits to be reduced over replicas, and the captured step "
            "computes none with which eager would reduce it. Run all microbatches of the step eagerly"
        )
        gradients = []
        for is_captured in (True, False):
            model = hybrid()
            step = capture_train_step(loss_of_halves, model, X, True)
            wait(model, False)
            if is_captured:
                step(X, True)
            else:
                loss_of_halves(model, X, True).backward()
            gradients.append([each.grad for each in model.parameters()])
            assert not pending_gradients(model)
        assert all(same_bits(one, other) for one, other in zip(*gradients, strict=True))
        model.zero_grad()
        step(X, True)
        assert not all(same_bits(p.grad, other) for p, other in zip(model.parameters(), gradients[1], strict=True))


def test_only_some_have_waited_in_the_dtype_of_reduction() -> None:
    with fake_process_group(2):
        model = fully_shard(Halves(), mesh=dist.init_device_mesh("cpu", (2,)), mp_policy=MIXED)
        step = capture_train_step(loss_of_halves, model, X, True)
        model.set_requires_gradient_sync(False)
        loss_of_halves(model, X, False).backward()
        model.set_requires_gradient_sync(True)
        assert refused(lambda: step(X, True)) == (
            "gradients of some parameters of an FSDP2 group wait in the dtype of its reduction, and none of others "
            "(torch.float32 of 'one.weight', torch.bfloat16 of 'other.weight'): a captured step does not reduce them "
            "together, nor does FSDP2 up to torch 2.14. Let all microbatches of a step train the same parameters"
        )
        if RELEASE < (2, 15):  # eager up to torch 2.14
            with pytest.raises(AssertionError, match="uniform gradient dtype"):
                loss_of_halves(model, X, True).backward()


NOWHERE = (
    "step.accumulate leaves gradients where FSDP2 keeps them, and fully_shard was not applied to the model; capture "
    "without optimizer=, call the step for each microbatch, and update after the last"
)


def test_models_whose_gradients_cannot_wait() -> None:
    model = build()
    step = capture_train_step(loss_fn, model, X, optimizer=torch.optim.SGD(model.parameters()))
    assert refused(lambda: step.accumulate(X)) == NOWHERE
    with fake_process_group(2):
        step = capture_train_step(loss_fn, simple_fsdp(build(), dist.init_device_mesh("cpu", (2,))), X)
        assert refused(lambda: step.accumulate(X)) == NOWHERE


def test_without_fsdp_and_optimizer_a_microbatch_is_a_call() -> None:
    model = build()
    step = capture_train_step(loss_fn, model, X)
    step.accumulate(X)
    once = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    step(X)
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert same_bits(parameter.grad, gradient * 2)


def test_a_step_that_was_made_of_a_trace() -> None:
    with fake_process_group(2):
        step = capture_train_step(loss_fn, model := sharded(), X)
        step.cuts = None
        model.set_requires_gradient_sync(False)
        assert refused(lambda: step(X)).startswith("gradients wait in FSDP2 to be reduced, or are to wait (set_")


class AddsViews(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.place, self.kind = (nn.Parameter(torch.ones(2, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[None] + (self.place[None] + self.kind[None])).relu()


def test_gradients_that_wait_and_are_views_of_one_tensor() -> None:
    with fake_process_group(2):
        model = fully_shard(AddsViews(), mesh=dist.init_device_mesh("cpu", (2,)))
        step = capture_train_step(loss_fn, model, X, check=False)
        step(X)
        step.accumulate(X)
        assert refused(lambda: step(X)).startswith(
            "the gradients of 'place' and 'kind', which wait in FSDP2 to be reduced, are views of one tensor"
        )
