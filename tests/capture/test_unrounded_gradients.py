"""SimpleFSDP's gradients have the dtype in which FSDP2 of this torch reduces them, or are refused."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphpasses
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.analysis.parameter_collectives import find_grad_reductions
from graphpasses.capture import capture_train_step, simple_fsdp, unrounded_gradients
from graphpasses.capture.unrounded_gradients import keep_unrounded
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp import BucketPlan
from graphpasses.graph import CapturedStep
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import default_pipeline
from tests.helpers.models import Parallel, captured_over_tensor_parallel, make_mesh


class Promotes(nn.Module):
    """``gain`` has a float32 gradient, and so have views and casts that the model makes of others."""

    def __init__(self, uses: int = 1) -> None:
        super().__init__()
        self.gain, self.cast, self.viewed, self.plain = (nn.Parameter(torch.ones(4)) for _ in range(4))
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.gain
        for _ in range(self.uses):
            x = x.float() * gain
        if self.uses == 2:
            x = x + (x.bfloat16() * gain).float()
        x = x.float() * self.viewed.view(1, 4)
        return (x * self.cast.float()).sum() + (x.bfloat16() * self.plain).sum()


def captured(model: nn.Module, reduce_dtype: torch.dtype | None = torch.float32) -> CapturedStep:
    simple_fsdp(model, make_mesh(), param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return capture_train_step(lambda model, x: model(x), model, torch.ones(3, 4))


def packed_from(step: CapturedStep) -> dict[str, torch.dtype]:
    return {fqn: reduction.gradient.meta["val"].dtype for fqn, (reduction,) in find_grad_reductions(step).items()}


def test_what_an_operator_promotes_is_not_rounded() -> None:
    with fake_process_group(4):
        step = captured(Promotes())
        wide = torch.float32 if RELEASE >= (2, 15) else torch.bfloat16
        low = dict.fromkeys(("cast", "viewed", "plain"), torch.bfloat16)
        assert packed_from(step) == {"gain": wide, **low}
        note = (
            "gradients are not rounded to the dtype of compute before they are reduced, as in FSDP2 of this torch; "
            "SimpleFSDP alone rounds them: gain"
        )
        assert step.notes == ([note] if RELEASE >= (2, 15) else [])
        before = step.module.code
        keep_unrounded(step, step.model)  # a second run changes nothing
        assert step.module.code == before


def test_a_reduction_that_is_not_wider_is_left_alone() -> None:
    with fake_process_group(4):
        assert set(packed_from(captured(Promotes(), torch.bfloat16)).values()) == {torch.bfloat16}


@pytest.mark.skipif(RELEASE < (2, 15), reason="FSDP2 of this torch rounds, too")
def test_gradients_of_several_dtypes_are_refused() -> None:
    with fake_process_group(4), pytest.raises(UnsupportedError) as caught:
        captured(Promotes(uses=2))
    assert str(caught.value) == (
        "2 of 3 uses of parameter 'gain' give it a gradient that is wider than it, which FSDP2 of this torch adds to "
        "the others unrounded; SimpleFSDP rounds it first. Capture the model that fully_shard sharded"
    )


@pytest.mark.skipif(RELEASE < (2, 15), reason="tensor parallelism of this torch adds in bfloat16")
def test_tensor_parallelism_adds_in_the_dtype_of_the_reduction() -> None:
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    with fake_process_group(4):
        step = captured_over_tensor_parallel(Parallel(), **options)
        found = packed_from(step)
        wide = [fqn for fqn, dtype in found.items() if dtype == torch.float32]
        assert wide == [f"layers.{layer}.norm.{name}" for layer in (0, 1) for name in ("weight", "bias")]
        (note,) = step.notes
        assert note == (
            "tensor parallelism adds gradients in the dtype in which FSDP reduces them, as in FSDP2 of this torch; "
            f"with SimpleFSDP alone it adds them in the dtype of compute: {', '.join(wide)}"
        )
        before = step.module.code
        keep_unrounded(step, step.model)
        assert step.module.code == before
        with pytest.raises(UnsupportedError) as caught:
            captured_over_tensor_parallel(Parallel(num_runs=2), **options)
    assert str(caught.value) == (
        "parameter 'layers.0.down.bias', which tensor parallelism replicates, has 2 uses, whose gradients FSDP2 of "
        "this torch adds in the dtype in which it reduces; SimpleFSDP adds them in that of compute. Capture the "
        "model that fully_shard sharded, or reduce in the dtype of compute"
    )


def have_eagers_gradients(is_rounded: bool) -> list[dict[str, bool]]:
    """Runs on every rank: which gradients of a captured step, and of a compiled model, are eager FSDP2's."""
    torch.manual_seed(0)
    eager = Promotes()
    models = [copy.deepcopy(eager) for _ in range(2)]
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(eager, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for model in models:
        simple_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(torch.distributed.get_rank())
    batch = torch.randn(3, 4).bfloat16()  # FSDP2 casts what it is given
    eager(batch).backward()
    pipeline = default_pipeline(BucketPlan.from_fully_shard(eager))
    is_kept = unrounded_gradients.KEEPS_GRADIENT_DTYPES and not is_rounded
    with mock.patch.object(unrounded_gradients, "KEEPS_GRADIENT_DTYPES", is_kept):
        pipeline.run(capture_train_step(lambda model, x: model(x), models[0], batch))(batch)
        graphpasses.compile(models[1], pipeline=pipeline, inner="aot_eager")(batch).backward()
    expected = local_gradients(eager)
    return [
        {fqn: torch.equal(each, expected[fqn]) for fqn, each in local_gradients(model).items()} for model in models
    ]


def local_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: each.grad.to_local() for fqn, each in model.named_parameters()}


@pytest.mark.multiprocess
@pytest.mark.parametrize("is_rounded", [False, True])
def test_captured_and_compiled_steps_have_the_gradients_of_fsdp2(is_rounded: bool) -> None:
    others = dict.fromkeys(("cast", "viewed", "plain"), True)
    expected = others | {"gain": not (is_rounded and RELEASE >= (2, 15))}
    for captured_and_compiled in run_ranks(have_eagers_gradients, 2, is_rounded):
        assert captured_and_compiled == [expected, expected]
