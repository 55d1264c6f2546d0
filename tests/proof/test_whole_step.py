"""What of a step is proved beside its outputs: the optimizer's step, totals of tied gradients, signs of zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.fsdp import fully_shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep
from graphpasses.proof.prove import prove

X = torch.ones(2, 4)
aten = torch.ops.aten


def refused(before: CapturedStep, after: CapturedStep) -> str:
    with pytest.raises(ProofError) as caught:
        prove(before, after)
    return str(caught.value)


# ---- the optimizer's step ------------------------------------------------------------------------------


def updating(clip_norm: float | None = None) -> CapturedStep:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return capture_train_step(
        lambda model, x: model(x).square().mean(), model, X, optimizer=optimizer, clip_norm=clip_norm
    )


def change_eps(graph: fx.Graph) -> None:
    placeholders = set(graph.find_nodes(op="placeholder"))
    node = next(node for node in graph.nodes if node.target is aten.add_.Tensor and node.args[1] in placeholders)
    node.args = (node.args[0], 1.0)


def divide_twice(graph: fx.Graph) -> None:
    node = next(node for node in graph.nodes if "addcdiv" in str(node.target))
    with graph.inserting_after(node):
        graph.node_copy(node).meta = dict(node.meta)


@pytest.mark.parametrize("change", [change_eps, divide_twice])
def test_a_changed_update(change: Callable[[fx.Graph], None]) -> None:
    step = updating()
    other = step.copy()
    assert "parameter weight" in prove(step, other).proved
    assert other.update is not None
    change(other.update.module.graph)
    assert refused(step, other).startswith("the rewritten step changes parameter weight")
    assert "parameter weight" in prove(step, step.copy()).proved  # the pass did not reach the captured one


def test_a_changed_norm_that_the_update_returns() -> None:
    step = updating(clip_norm=1.0)
    other = step.copy()
    assert "output 0 of the update" in prove(step, other).proved
    assert other.update is not None
    output = other.update.module.graph.output_node()
    (norm,) = output.args[0]  # type: ignore[misc]
    with other.update.module.graph.inserting_before(output):
        output.args = ([other.update.module.graph.call_function(aten.mul.Tensor, (norm, 2.0))],)
    assert refused(step, other).startswith("the rewritten step changes output 0 of the update")


def test_a_number_in_the_place_of_a_gradient() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return model(x).square().mean(), x.sum().item()

    step = capture_train_step(loss_fn, nn.Linear(4, 4), X)
    other = step.copy()
    output = other.module.graph.output_node()
    loss, weight, bias, number = output.args[0]  # type: ignore[misc]
    output.args = ([loss, number, bias, weight],)
    text = refused(step, other)
    assert text.startswith("the rewritten step changes the gradient of 'weight' (and 1 others: ")
    assert "a tensor becomes " in text


def test_an_update_by_a_gradient_that_is_not_proved() -> None:
    step = updating()
    other = step.copy()
    (index,) = other.gradient_slots()["weight"]
    gradient = other.output_values[index]
    with other.graph.inserting_before(other.graph.output_node()):
        same = other.emit(aten.maximum.default, (gradient, gradient), like=gradient)  # which no rule knows
    other.set_output(index, same)
    certificate = prove(step, other)
    assert {"the gradient of 'weight'", "parameter weight"} <= dict(certificate.unproved).keys()
    assert certificate.proved[0] == "the loss"


def test_a_parameter_written_before_its_update() -> None:
    step = updating()
    for number, answer in ((0.0, True), (1.0, False)):
        other = step.copy()
        name, node = next(iter(other.parameter_placeholders()))
        with other.graph.inserting_before(other.graph.output_node()):
            other.emit(aten.mul_.Tensor, (node, 1.0 + number), like=other.output_values[0])
        if answer:
            assert prove(step, other)
        else:
            assert f"parameter {name}" in refused(step, other)


def draw(graph: fx.Graph) -> None:
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(aten.rand.default, ([2],), {"device": torch.device("cpu")})
    node.meta["val"] = torch.empty(2, device="meta")


def test_an_update_that_draws_random_numbers() -> None:
    step = updating()
    other = step.copy()
    assert other.update is not None
    draw(other.update.module.graph)
    assert "the state of random numbers" in refused(step, other)
    assert prove(other, other.copy()).proved


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_constant_of_an_update_that_a_pass_writes(factor: float) -> None:
    step = updating()
    assert step.update is not None
    module = step.update.module
    module.held = torch.tensor(0.5)
    decay = next(node for node in module.graph.nodes if node.target is aten.mul_.Tensor)
    with module.graph.inserting_before(decay):
        held = module.graph.create_node("get_attr", "held")
    held.meta["val"] = decay.meta["val"].new_empty(())
    decay.args = (decay.args[0], held)
    other = step.copy()
    module.held.mul_(factor)
    if factor == 1.0:
        assert "parameter weight" in prove(step, other).proved
    else:
        assert "parameter weight" in refused(step, other)


def test_an_update_that_waits_for_no_one() -> None:
    with fake_process_group(2):
        step = updating()
        other = step.copy()
        assert other.update is not None
        graph = other.update.module.graph
        given = next(iter(graph.find_nodes(op="placeholder")))
        with graph.inserting_before(graph.output_node()):
            node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (given, "sum", "0"))
        node.meta["val"] = given.meta["val"]
        assert "is launched and never waited for" in refused(step, other)


def test_a_lost_update() -> None:
    step = updating()
    other = step.copy()
    other.update = None
    assert "it is lost" in refused(step, other)


def test_a_lost_update_of_a_sharded_parameter() -> None:
    with fake_process_group(2):
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters())
        step = capture_train_step(lambda model, x: model(x).square().mean(), model, X, optimizer=optimizer)
        assert "parameter bias (_local_tensor)" in prove(step, step.copy()).proved
        other = step.copy()
        assert other.update is not None
        graph = other.update.module.graph
        *_, last = graph.find_nodes(op="call_function", target=aten.add_.Tensor)
        last.replace_all_uses_with(last.args[0])
        graph.erase_node(last)
        assert "changes parameter bias (_local_tensor): it is lost" in refused(step, other)


# ---- memory of gradients -------------------------------------------------------------------------------


def test_a_gradient_that_lies_in_the_batch() -> None:
    step = capture_train_step(lambda model, x: (model.weight * x).sum(), nn.Linear(4, 2), X, check=False)
    (index,) = step.gradient_slots()["weight"]
    gradient, batch = step.output_values[index], step.placeholders[-1]
    copied, shared = step.copy(), step.copy()
    for other, target in ((copied, aten.clone.default), (shared, aten.alias.default)):
        with other.graph.inserting_before(other.graph.output_node()):
            read = next(node for node in other.graph.nodes if node.name == batch.name)
            other.set_output(index, other.emit(target, (read,), like=gradient))
    certificate = prove(copied, shared)
    assert "memory of" in dict(certificate.unproved)["the gradient of 'weight'"]
    assert prove(shared, copied)


# ---- totals --------------------------------------------------------------------------------------------


def test_one_of_two_gradients_of_a_tied_parameter_is_lost() -> None:
    with fake_process_group(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        model = simple_fsdp(model, dist.init_device_mesh("cpu", (2,)), param_dtype=torch.bfloat16)
        step = capture_train_step(lambda model, x: model(x).square().mean(), model, X)
        first, second = step.gradient_slots()["0.weight"]
        for lost in (first, second):
            other = step.copy()
            assert prove(step, other).proved
            other.set_output(lost, None)
            assert "the gradient of '0.weight'" in refused(step, other)


# ---- signs of zeros ------------------------------------------------------------------------------------


def padded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (1 / nn.functional.pad(model(x), (1, 1))).sum() + (1 / torch.zeros(3)).sum()


@pytest.mark.parametrize("target", [aten.constant_pad_nd.default, aten.zeros.default])
def test_minus_zero_is_not_zero(target: torch._ops.OpOverload) -> None:
    step = capture_train_step(padded, nn.Linear(4, 4), X)
    other = step.copy()
    node = next(iter(other.graph.find_nodes(op="call_function", target=target)))
    with other.graph.inserting_after(node):
        args = (node.args[0], -0.0) if target is aten.zeros.default else (*node.args[:2], -0.0)
        call = aten.full.default if target is aten.zeros.default else target
        new = other.graph.call_function(call, args, {**node.kwargs} if call is not target else {})
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    other.graph.erase_node(node)
    assert "the constant 0.0 became the constant -0.0" in refused(step, other)


@pytest.mark.parametrize("value", [2.0, 3, True, "mean", None])
def test_a_batch_with_what_is_no_tensor(value: object) -> None:
    step = capture_train_step(lambda model, x, value: model(x).square().mean(), nn.Linear(4, 4), X, value)
    assert not prove(step, step.copy()).unproved
