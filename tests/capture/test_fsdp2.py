"""What capture_train_step reads of an FSDP2 model, leaves as it was, and refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.errors import CaptureError, LayoutError, PlanError, UnsupportedError
from graphpasses.fsdp import BucketPlan
from graphpasses.fsdp.plan import premultiplied_note
from graphpasses.graph import CapturedStep
from graphpasses.passes import default_pipeline
from tests.helpers.models import LanguageModel, make_mesh, next_token_loss, token_batch


def sharded(model: nn.Module | None = None, **options: Any) -> FSDPModule:
    torch.manual_seed(0)
    model = LanguageModel() if model is None else model
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=make_mesh(), **options)
    return fully_shard(model, mesh=make_mesh(), **options)


def captured(model: nn.Module) -> CapturedStep:
    return capture_train_step(next_token_loss, model, *token_batch())


def refused(call: Callable[[], object], kind: type[Exception] = CaptureError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_collectives_are_eagers_before_any_pass() -> None:
    with fake_process_group(4):
        step = captured(sharded())
        assert step.collectives() == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 3}
        rewritten = default_pipeline().run(step)
        # Two blocks are resharded after forward; the root is not.
        assert rewritten.collectives() == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 3}
        assert default_pipeline().run(rewritten).collectives() == rewritten.collectives()


def test_a_sum_where_eager_asks_for_premul_sum_is_said_once() -> None:
    note = (
        "eager asks NCCL for PREMUL_SUM by one, this step for SUM, in 3 buckets ('layers.0' first). Their bits are "
        "equal unless NCCL takes NVLS or PAT for SUM: where the machine has those, set NCCL_NVLS_ENABLE=0 and "
        "NCCL_PAT_ENABLE=0 for both, or call set_force_sum_reduction_for_comms(True) on the eager model"
    )

    def each(model: FSDPModule) -> list[FSDPModule]:
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    with fake_process_group(4):
        model = sharded()
        for module in each(model):
            module.set_gradient_divide_factor(1.0)
        step = captured(model)
        assert note in step.notes
        assert str(default_pipeline().run(step).report).count(note) == 1
        simple = simple_fsdp(LanguageModel(), make_mesh())
        rewritten = default_pipeline(BucketPlan.from_fully_shard(model)).run(captured(simple))
        assert str(rewritten.report).count(note) == 1
        for module in each(model):
            module.set_force_sum_reduction_for_comms(True)
        assert note not in captured(model).notes
        assert premultiplied_note(BucketPlan.from_fully_shard(model).entries) is None


def test_a_list_of_modules_without_a_root_is_refused_each_time() -> None:
    with fake_process_group(4):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard([*model], mesh=make_mesh())
        for _ in range(2):
            with pytest.raises(CaptureError, match=r"^FSDP2 refuses the model: "):
                capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))


def test_one_rank_communicates_nothing() -> None:
    with fake_process_group(1):
        torch.manual_seed(0)
        model = fully_shard(LanguageModel(), mesh=make_mesh(1))
        step = default_pipeline().run(captured(model))
        assert step.collectives() == {}
        loss = step(*token_batch())
        gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        model.zero_grad()
        expected = next_token_loss(model, *token_batch())
        expected.backward()
        assert torch.equal(loss, expected)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert torch.equal(gradient, parameter.grad.to_local())


def test_the_pipeline_without_a_plan_needs_an_fsdp2_model() -> None:
    model = nn.Linear(4, 1)
    step = capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
    assert refused(lambda: default_pipeline().run(step), PlanError) == (
        "the model has no FSDP2 parameter group; call fully_shard on it first, or give the buckets yourself, e.g. "
        "with BucketPlan.from_modules"
    )


def test_a_plan_for_a_model_that_is_not_sharded_is_noted() -> None:
    model = nn.Linear(4, 1)
    step = capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4))
    report = default_pipeline(BucketPlan.from_modules([])).run(step).report
    assert report is not None
    assert report["bucket-fsdp-collectives"].notes == (
        "in the plan, but not sharded: neither gathered nor reduced: bias, weight",
    )


def test_a_graph_of_another_layout_than_the_models_is_refused() -> None:
    """The control of the layout that is read from the model."""
    with fake_process_group(4):
        model = sharded()
        step = captured(model)
        model.set_force_sum_reduction_for_comms(True)  # of the root's group
        message = refused(lambda: default_pipeline().run(step), LayoutError)
        assert message.startswith("the graph cannot meet the layout that was asked for")


def test_fsdp2_is_left_as_it_was() -> None:
    with fake_process_group(4):
        model = sharded()
        loss = next_token_loss(model, *token_batch())
        loss.backward()
        gradients = {fqn: parameter.grad for fqn, parameter in model.named_parameters()}
        before = dict(model.named_parameters())
        captured(model)
        assert all(parameter is before[fqn] for fqn, parameter in model.named_parameters())
        for fqn, parameter in model.named_parameters():
            assert parameter.grad is gradients[fqn]
        # The next eager step runs.
        next_token_loss(model, *token_batch()).backward()


def test_after_a_refused_capture_eager_goes_on() -> None:
    def fails(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        next_token_loss(model, tokens, labels)
        raise ValueError("midway")

    with fake_process_group(4):
        model = sharded()
        for _ in range(2):
            with pytest.raises(ValueError, match="midway"):
                capture_train_step(fails, model, *token_batch())
            next_token_loss(model, *token_batch()).backward()
        captured(model)


class _Communication:
    """Neither FSDP2's gather nor its reduction."""


def test_communication_of_ones_own() -> None:
    with fake_process_group(4):
        model = sharded()
        model.set_custom_all_gather(_Communication())
        assert refused(lambda: captured(model), UnsupportedError) == (
            "FSDP2 group '(root)' communicates through _Communication (set_custom_all_gather, "
            "set_custom_reduce_scatter, set_symm_mem_for_comm), whose bits a graph's collectives may not have. "
            "Remove it"
        )


def test_offloaded_parameters() -> None:
    with fake_process_group(4):
        model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
        assert refused(lambda: captured(model), UnsupportedError) == (
            "parameter 'emb.weight' is offloaded to the CPU (CPUOffloadPolicy), which a captured step does not "
            "follow. Call fully_shard without offload_policy"
        )


def test_another_fsdp2_model_in_loss_fn() -> None:
    with fake_process_group(4):
        model, teacher = sharded(), sharded()

        def loss_fn(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = teacher(tokens)
            return (model(tokens) - target).square().sum()

        for _ in range(2):
            assert refused(lambda: capture_train_step(loss_fn, model, *token_batch())) == (
                "loss_fn runs a FSDPLanguageModel that fully_shard sharded and that is no part of the model. Name "
                "it: capture_train_step(..., others=(teacher,)), or compute its outputs before the step and give "
                "them in the batch"
            )
        teacher(token_batch()[0])
        model(token_batch()[0])


@pytest.mark.parametrize("check", [True, False])
def test_a_penalty_on_shards(check: bool) -> None:
    def penalized(model: nn.Module, *batch: torch.Tensor, of: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
        loss = next_token_loss(model, *batch)  # blocks are sharded again, the root's own weights are not
        for parameter in of(model).parameters(recurse=False):
            loss = loss + (parameter.to_local() if isinstance(parameter, DTensor) else parameter).square().sum()
        return loss

    with fake_process_group(4):
        model = sharded()
        capture_train_step(partial(penalized, of=lambda model: model.norm), model, *token_batch(), check=check)
        loss_fn = partial(penalized, of=lambda model: model.layers[0].norm)
        assert refused(lambda: capture_train_step(loss_fn, model, *token_batch(), check=check)).startswith(
            "loss_fn reads the shard of 'layers.0."
        )


class _Reentrant(LanguageModel):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        return self.head(self.norm(x))


def test_gradients_that_eager_leaves_unreduced() -> None:
    """As FSDP2 does after reentrant checkpointing of a block that runs twice."""
    with fake_process_group(4):
        model = sharded(_Reentrant())
        assert refused(lambda: captured(model)) == (
            "eager FSDP2 would not reduce the gradient of 'layers.0.down.weight': it is complete only after its "
            "group has reduced. Use the parameter inside its own fully_sharded module only"
        )


class _Unfreezes(nn.Module):
    """Its frozen parameter may be of another dtype than the trained ones; forward trains it."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
        self.is_trained = is_trained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gain.requires_grad_(self.is_trained)
        return (self.up(x) * self.gain).sum()


def test_gradients_of_several_dtypes() -> None:
    def capture(is_trained: bool, check: bool = True) -> CapturedStep:
        model = fully_shard(_Unfreezes(is_trained), mesh=make_mesh())
        return capture_train_step(lambda model, x: model(x), model, torch.ones(2, 4), check=check)

    with fake_process_group(4):
        capture(is_trained=False)  # the near miss: a parameter without a gradient
        for check in (True, False):
            kind = UnsupportedError if RELEASE >= (2, 15) else CaptureError
            assert refused(lambda check=check: capture(is_trained=True, check=check), kind) == (
                "FSDP2 group '(root)' keeps gradients in several dtypes, or in any (grad_dtype): torch.float32 of "
                "'up.weight', 'up.bias'; torch.bfloat16 of 'gain'. A captured step packs gradients of one dtype. "
                "Give all parameters of the group one grad_dtype, or shard the module of the others by itself"
                if RELEASE >= (2, 15)
                else "FSDP2 group '(root)' has gradients of several dtypes, which eager FSDP2 refuses to reduce: "
                "torch.float32 of 'up.weight', 'up.bias'; torch.bfloat16 of 'gain'. Give all gradients of the group "
                "one dtype, or shard the module of the others by itself"
            )
        if RELEASE >= (2, 15):
            return
        eager = fully_shard(_Unfreezes(is_trained=True), mesh=make_mesh())
        with pytest.raises(AssertionError, match="expects uniform gradient dtype"):
            eager(torch.ones(2, 4)).backward()


@pytest.mark.skipif(RELEASE >= (2, 14), reason="FSDP2 of this torch does not ask what is trained first")
def test_layers_that_are_first_trained_later() -> None:
    """As LISA trains other layers every few steps. Near miss: they were trained in the first forward."""

    def train(is_trained_first: bool) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        layers = [nn.Linear(4, 4), fully_shard(nn.Linear(4, 4), mesh=make_mesh(), mp_policy=policy)]
        model, x = sharded(nn.Sequential(*layers), mp_policy=policy), torch.ones(2, 4)
        model[1].requires_grad_(is_trained_first)
        step = default_pipeline().run(capture_train_step(lambda model, x: model(x).float().mean(), model, x))
        model[1].requires_grad_(not is_trained_first)
        step(x)

    with fake_process_group(4):
        train(is_trained_first=True)
        assert "'1' trains parameters, and trained none in" in refused(lambda: train(is_trained_first=False))


@pytest.mark.skipif(RELEASE < (2, 15), reason="FSDP2 of this torch has no such setting")
@pytest.mark.parametrize("kept", [None, torch.bfloat16])
def test_gradients_that_are_kept_otherwise(kept: torch.dtype | None) -> None:
    with fake_process_group(4):
        model = nn.Linear(4, 4)
        model.bias.grad_dtype = kept
        fully_shard(model, mesh=make_mesh())
        message = refused(
            lambda: capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(2, 4)),
            UnsupportedError,
        )
    assert message == (
        "FSDP2 group '(root)' keeps gradients in several dtypes, or in any (grad_dtype): torch.float32 of 'weight'; "
        f"{kept} of 'bias'. A captured step packs gradients of one dtype. Give all parameters of the group one "
        "grad_dtype, or shard the module of the others by itself"
    )


@pytest.mark.skipif(RELEASE < (2, 15), reason="FSDP2 of this torch has no such setting")
def test_gradients_that_are_reduced_by_hand() -> None:
    with fake_process_group(4):
        model = sharded()
        model.set_manual_backward_finalization(True)
        assert refused(lambda: captured(model), UnsupportedError) == (
            "FSDP2's root module is to be finalized by hand (set_manual_backward_finalization), and a captured step "
            "reduces all gradients before it ends. Turn it off"
        )


def test_trainable_parameters_of_several_dtypes() -> None:
    """As eager FSDP2 does, at its first forward."""
    with fake_process_group(4):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
        sharded(model)
        assert refused(lambda: captured(model), LayoutError) == (
            "FSDP2 group '(root)' has trainable parameters of several dtypes, torch.bfloat16, torch.float32, which "
            "FSDP2 refuses to run; put them in separate groups"
        )
        with pytest.raises(AssertionError, match="expects uniform original parameter dtype"):
            model(torch.ones(2, 4))


def test_policies_may_differ_between_modules() -> None:
    with fake_process_group(4):
        model = LanguageModel(tied=False)
        # Without an output_dtype the next layer would get bf16 for its fp32 weights, which eager refuses.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        fully_shard(model.layers[0], mesh=make_mesh(), mp_policy=policy)
        fully_shard(model, mesh=make_mesh())
        step = captured(model)
        sent = [node.args[0].meta["val"].dtype for node in step.graph.nodes if "all_gather" in str(node.target)]
        assert sent == [torch.float32, torch.bfloat16]


def test_tensors_from_outside() -> None:
    scale, head = torch.tensor(2.0), nn.Linear(1, 1)
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    step = capture_train_step(lambda model, x: (model(x) * scale * torch.tensor([3.0])).sum(), model, x)
    note = (
        "loss_fn reads 1 tensors from outside the model and the batch (shape [], torch.float32): the step keeps "
        "these objects, and sees what is written into them, but not other tensors under their names"
    )
    assert step.notes == [note]
    report = default_pipeline(BucketPlan.from_modules([])).run(step).report
    assert report is not None
    assert report.notes == (note,)
    assert f"capture: {note}" in str(report)
    before = step(x)
    scale.mul_(2)
    assert torch.equal(step(x), before * 2)
    assert refused(lambda: capture_train_step(lambda model, x: head(model(x)).sum(), model, x)) == (
        "loss_fn reads a trainable tensor of shape [1, 1], torch.float32, that is no part of the model; a captured "
        "step would not compute its gradient. Name its model (capture_train_step(..., others=(other,))), or "
        "detach it"
    )
    assert all(parameter.grad is None for parameter in head.parameters())


def test_clipping_that_fails_in_eager_is_named() -> None:
    with fake_process_group(4):
        model = LanguageModel(tied=False)
        fully_shard(model.layers[0], mesh=make_mesh(hybrid=True))
        fully_shard(model, mesh=make_mesh())
        optimizer = torch.optim.SGD(model.parameters())
        capture = partial(capture_train_step, next_token_loss, model, *token_batch(), optimizer=optimizer)
        capture()
        assert refused(partial(capture, clip_norm=1.0)).startswith(
            "torch.nn.utils.clip_grad_norm_ fails on these gradients, as it does in eager: All operands in "
            "aten.stack.default must have the same mesh"
        )


def test_a_refused_model_from_outside_keeps_its_gradients() -> None:
    with fake_process_group(2):
        model, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        fully_shard(model)
        critic.bias.grad = bias = torch.ones(1)
        with pytest.raises(CaptureError, match="trainable tensor of shape"):
            capture_train_step(lambda model, x: critic(model(x)).mean(), model, torch.ones(2, 4))
        assert critic.weight.grad is None
        assert critic.bias.grad is bias
        assert bias.item() == 1
