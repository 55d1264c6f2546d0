"""What changes of an FSDP2 model after the capture, and what eager FSDP2 keeps of it between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import init_device_mesh

from graphpasses import capture_train_step
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.fsdp2 import fsdp_groups, reshard
from graphpasses.passes import default_pipeline
from tests.capture.test_fsdp2 import captured, refused, sharded
from tests.helpers.models import make_mesh, next_token_loss, token_batch

SETTINGS: dict[str, tuple[Callable[[FSDPModule], object], str]] = {
    "factor": (
        lambda model: model.set_gradient_divide_factor(2.0),
        "set_gradient_divide_factor of FSDP2 group '' was None when the step was captured, and is 2.0 now",
    ),
    "unused": (
        lambda model: model.set_reduce_scatter_unused_params(True),
        "set_reduce_scatter_unused_params of FSDP2 group '' was False when the step was captured, and is True now",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_changed_after_the_capture(name: str) -> None:
    change, message = SETTINGS[name]
    with fake_process_group(4):
        model = sharded()
        step = replace(captured(model), recapture=None)
        step(*token_batch())
        change(model)
        assert refused(lambda: step(*token_batch())) == (
            message.replace("''", "'(root)'") + "; capture the step again, or undo the change"
        )


OUTDATED = (
    "parameter 'emb.weight' changed while it was unsharded, as a forward without a backward leaves it (an evaluation "
    "before optimizer.step()), or set_reshard_after_backward(False): eager FSDP2 would train on with the old values. "
    "Call reshard() on its fully_sharded module before it changes"
)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 2}], ids=["whole", "on two ranks"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_parameter_changed_while_it_was_unsharded(is_captured: bool, options: dict[str, int]) -> None:
    with fake_process_group(4):
        model = sharded(**options)
        step = captured(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(*token_batch())
        with torch.no_grad():
            next_token_loss(model, *token_batch())
        step(*token_batch())  # nothing changed: near miss
        with torch.no_grad():
            next_token_loss(model, *token_batch())
        optimizer.step()
        call = (lambda: captured(model)) if is_captured else (lambda: step(*token_batch()))
        assert refused(call) == OUTDATED
        reshard(fsdp_groups(model))
        call()


REPLACED = (
    "parameter 'norm.weight' was replaced after a forward (another nn.Parameter, or other memory): eager FSDP2 "
    "gathers what was there before. Write into it (copy_), or give it with load_state_dict"
)


def test_a_parameter_that_is_frozen_while_it_is_unsharded() -> None:
    with fake_process_group(4):
        model = sharded()
        step = captured(model)
        with torch.no_grad():
            model(token_batch()[0])
        model.emb.weight.requires_grad_(False)
        assert refused(lambda: step(*token_batch())) == (
            "requires_grad of parameter 'emb.weight' was set while it was unsharded, as a forward without a backward "
            "leaves it: eager FSDP2 obeys it for one step, and forgets it then. Call reshard() on its fully_sharded "
            "module before"
        )
        reshard(fsdp_groups(model))
        step(*token_batch())


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_parameter_replaced_after_a_forward(is_captured: bool) -> None:
    with fake_process_group(4):
        model = sharded()
        model.norm.bias = nn.Parameter(model.norm.bias.detach() + 2)  # before the first: FSDP2 takes it
        step = captured(model)
        step(*token_batch())
        model.norm.load_state_dict(
            {name: each.clone() for name, each in model.norm.state_dict().items()}, assign=True
        )
        step(*token_batch())
        next_token_loss(model, *token_batch()).backward()
        step(*token_batch())  # nothing was replaced since: near miss
        model.norm.weight = nn.Parameter(model.norm.weight.detach() * 2)
        call = (lambda: captured(model)) if is_captured else (lambda: step(*token_batch()))
        assert refused(call) == REPLACED


def test_a_parameter_that_backward_left_unsharded() -> None:
    with fake_process_group(4):
        model = sharded()
        step = captured(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.set_reshard_after_backward(False)
        for _ in range(2):  # nothing changed: near miss
            step(*token_batch())
        optimizer.step()
        assert refused(lambda: step(*token_batch())) == OUTDATED
        reshard(fsdp_groups(model))
        step(*token_batch())


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 2}], ids=["whole", "on two ranks"])
@pytest.mark.parametrize("reshards", [False, True])
def test_a_teacher_changed_while_eager_has_it_unsharded(reshards: bool, options: dict[str, int]) -> None:
    """No backward frees a teacher's root: eager reads the old values of what a list of its shards changes."""
    with fake_process_group(4):
        model, teacher = sharded(), sharded(**options)
        shards = list(teacher.requires_grad_(False).parameters())

        def loss_fn(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = next_token_loss(teacher, *batch)
            return next_token_loss(model, *batch) - target

        step = capture_train_step(loss_fn, model, *token_batch(), others=(teacher,), recapture=False)
        assert all(group.is_sharded for group in fsdp_groups(teacher))
        gather = mock.Mock(wraps=_fsdp_param_group.foreach_all_gather)
        with mock.patch.object(_fsdp_param_group, "foreach_all_gather", gather):
            for _ in range(3):  # nothing changed: near miss
                step(*token_batch())
        assert gather.call_count == sum(group.is_unsharded for group in fsdp_groups(teacher)) > 0  # once each
        if reshards:
            reshard(fsdp_groups(teacher))
        torch._foreach_mul_(shards, 0.9)  # type: ignore[arg-type]
        if not reshards:
            assert refused(lambda: step(*token_batch())) == OUTDATED
            reshard(fsdp_groups(teacher))
        step(*token_batch())


def _load(teacher: nn.Module, model: nn.Module) -> None:
    teacher.load_state_dict(model.state_dict())


@torch.no_grad()
def _average(teacher: nn.Module, model: nn.Module) -> None:
    for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
        ours.data.lerp_(theirs, 0.5)


WRITTEN = (
    "loss_fn writes parameter {!r}, of a fully_sharded module that it leaves unsharded, as a forward without a "
    "backward does, or set_reshard_after_backward(False): eager FSDP2 reads that memory from then on, not the "
    "shards, until it reshards. Let the step do so, by fully_shard(..., reshard_after_forward=True), by reshard() "
    "at the end of loss_fn, or by set_reshard_after_backward(True); or write it after the step, and call its "
    "reshard() before"
)


@pytest.mark.parametrize("write", [_load, _average])
@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_teacher_that_loss_fn_writes_and_leaves_unsharded(comes: str, write: Callable[..., None]) -> None:
    """Its shards were written, or what was gathered of them, which is eager's teacher from then on."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if comes == "before":
            write(teacher, model)
        with torch.no_grad():
            target = teacher(x)
        loss = (model(x) - target).square().mean()
        if comes == "after":
            write(teacher, model)
        if ends_sharded:
            teacher.reshard()
        return loss

    with fake_process_group(4):
        for reshards, ends_sharded in [(True, False), (False, True), (False, False)]:
            models = nn.Sequential(nn.Linear(4, 8)), nn.Sequential(nn.Linear(4, 8))
            model, teacher = (
                fully_shard(each, mesh=make_mesh(), reshard_after_forward=reshards or None) for each in models
            )
            teacher.requires_grad_(False)
            call = partial(capture_train_step, loss_fn, model, torch.ones(2, 4), others=(teacher,))
            # load_state_dict shards the teacher by itself.
            if reshards or ends_sharded or (comes, write) == ("after", _load):
                call()
            else:
                assert refused(call) == WRITTEN.format("others.0.0.weight")


def test_a_weight_that_forward_writes_and_backward_leaves_unsharded() -> None:
    def loss_fn(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    class Decays(nn.Linear):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.mul_(0.9)
            with torch.enable_grad():
                return super().forward(x)

    with fake_process_group(4):
        model = nn.Sequential(Decays(4, 8), nn.Linear(8, 8))
        for each in (model[1], model):
            fully_shard(each, mesh=make_mesh())
        step = capture_train_step(loss_fn, model, torch.ones(2, 4), recapture=False)
        step(torch.ones(2, 4))  # what is written is freed: near miss
        assert isinstance(model, FSDPModule)
        assert isinstance(model[1], FSDPModule)
        model[1].set_reshard_after_backward(False)  # another group than that of the weight: near miss
        step(torch.ones(2, 4))
        model.set_reshard_after_backward(False)
        assert refused(lambda: step(torch.ones(2, 4))) == WRITTEN.format("0.weight")
        assert refused(lambda: step.accumulate(torch.ones(2, 4))) == WRITTEN.format("0.weight")


def test_a_state_that_loss_fn_loads_is_no_other_memory() -> None:
    """On the rank that has fewer rows FSDP2 padded the shard again, and that rank alone copied it."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model[1].load_state_dict(model[0].state_dict())
        with torch.no_grad():
            target = model[1](x)
        return (model[0](x) - target).square().mean()

    graphs = []
    for rank in range(2):
        with fake_process_group(2, rank):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"ranks of {rank}",))
            layers = [nn.Linear(4, 3), nn.Linear(4, 3)]
            model = nn.Sequential(*(fully_shard(each, mesh=mesh, reshard_after_forward=True) for each in layers))
            step = capture_train_step(loss_fn, model, torch.ones(2, 4), check=False, recapture=False)
            graphs.append([node.target for node in step.graph.find_nodes(op="call_function", target=_ZEROS)])
    assert graphs[0] == graphs[1]


_ZEROS = torch.ops.aten.new_zeros.default


def test_what_forward_writes_into_the_one_shard() -> None:
    """Eager gathers a shard that is alone into other memory, too, and frees what is written there."""
    x = torch.arange(6)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    with fake_process_group(1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 2))
        fully_shard(model, mesh=make_mesh(1))
        before = [each.to_local().clone() for each in model.parameters()]
        step = default_pipeline().run(capture_train_step(loss_fn, model, x, recapture=False))
        losses, gradients = [], []
        for call in (step, partial(loss_fn, model)):
            loss = call(x)
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach())
            gradients.append([each.grad.to_local().clone() for each in model.parameters()])
            model.zero_grad()
            assert all(map(torch.equal, before, (each.to_local() for each in model.parameters())))
    assert torch.equal(*losses)
    assert all(map(torch.equal, *gradients))


def test_what_decides_no_bits_may_change() -> None:
    def stop(*_: object) -> None:
        raise ValueError("midway")

    with fake_process_group(4):
        model = sharded()
        step = captured(model)
        block = model.get_submodule("layers.0")
        assert isinstance(block, FSDPModule)
        model.set_modules_to_forward_prefetch([block])
        model.set_reshard_after_forward(False)
        step(*token_batch())
        with mock.patch.object(block, "forward", stop), pytest.raises(ValueError, match="midway"):
            next_token_loss(model, *token_batch())
        step(*token_batch())


def test_eager_trains_after_an_evaluation_in_inference_mode() -> None:
    with fake_process_group(4):
        model = sharded()
        captured(model)(*token_batch())
        with torch.inference_mode():
            next_token_loss(model, *token_batch())
        next_token_loss(model, *token_batch()).backward()
