"""What a collective brought may be written in part: its memory holds that, however many were launched before."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.errors import ProofError
from tests.proof.code import Code, Make, answer, capture_model

aten, collectives = torch.ops.aten, torch.ops._c10d_functional


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    came = collectives.wait_tensor(collectives.all_reduce(x, "sum", "0"))
    came[:1].add_(x[:1])  # as ring attention adds gradients to what another rank sends
    loss: torch.Tensor = (model(x) * came).sum()
    return loss


@pytest.mark.parametrize("is_other", [False, True])
def test_one_more_launch_before_it(is_other: bool) -> None:
    with fake_process_group(2):
        step = gp.capture_train_step(loss_of, nn.Linear(3, 3), torch.ones(2, 3))
        after = step.copy()
        (launch,) = after.graph.find_nodes(op="call_function", target=collectives.all_reduce.default)
        with after.graph.inserting_before(launch):
            more = after.emit(collectives.all_reduce.default, (launch.args[0], "max", "0"), like=launch)
            came = after.emit(collectives.wait_tensor.default, (more,), like=launch)
        if is_other:
            launch.replace_input_with(launch.args[0], came)
            with pytest.raises(ProofError, match=r"the rewritten step .* the loss"):
                gp.prove(step, after)
            return
        assert not gp.prove(step, after).unproved


def loss_in_place(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    came = collectives.wait_tensor(collectives.all_reduce_(x, "sum", "0"))
    loss: torch.Tensor = (model(came) * (y * 2)).sum()
    return loss


@pytest.mark.parametrize("first", [1, 2])
def test_another_tensor_of_the_batch_in_that_memory(first: int) -> None:
    """What is read before the wait lies in the rows that the collective brings, or behind them."""
    both = torch.ones(4, 3)
    with fake_process_group(2):
        step = gp.capture_train_step(loss_in_place, nn.Linear(3, 3), both[:2], both[first : first + 2], check=False)
        after = step.copy()
        (launch,) = after.graph.find_nodes(op="call_function", target=collectives.all_reduce_.default)
        launch.append(after.graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0])
        if first == 2:
            assert not gp.prove(step, after).unproved
            return
        with pytest.raises(ProofError, match=r"depend on chance: all_reduce_ brings, .* which mul reads"):
            gp.prove(step, after)


def loss_of_parts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    flat = x * 1.5
    parts = [collectives.all_reduce_(part, "sum", "0") for part in (flat[:2], flat[2:4])]
    for part in parts:
        collectives.wait_tensor(part)
    flat[:2].mul_(3.0)
    flat[4:].add_(flat[:2])
    loss: torch.Tensor = model(flat).sum()
    return loss


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (aten.mul_.Tensor, "mul_ writes what all_reduce_ brings"),
        (aten.add_.Tensor, "all_reduce_ brings, before anyone has waited, .* which add_ reads"),
    ],
)
def test_several_launches_into_one_memory(target: object, message: str) -> None:
    with fake_process_group(2):
        step = gp.capture_train_step(loss_of_parts, nn.Linear(3, 3), torch.ones(6, 3), check=False)
        assert not gp.prove(step, step.copy()).unproved
        after = step.copy()
        *_, launch = after.graph.find_nodes(op="call_function", target=collectives.all_reduce_.default)
        (write,) = after.graph.find_nodes(op="call_function", target=target)
        following = launch
        for node in [*after.graph.nodes]:  # the write, and the views that it is given
            if node is write or (node in write.all_input_nodes and launch < node):
                following.append(node)
                following = node
        after.graph.lint()
        with pytest.raises(ProofError, match=f"depend on chance: {message}"):
            gp.prove(step, after)


def test_what_is_reduced_in_place_is_added_in_the_order_of_its_memory() -> None:
    """Where an element lies in what is sent decides in which order ranks add it up, as with 4 ranks of gloo."""

    def make(launch: torch._ops.OpOverload, *, is_turned: bool) -> Make:
        def function(code: Code) -> fx.Node:
            turned = code.clone_default(code.t_default(code.clone_default(code.x)))
            sent = turned if is_turned else code.clone_default(turned, memory_format=torch.contiguous_format)
            came = code.call(collectives.wait_tensor.default, code.call(launch, sent, "sum", "0"))
            return code.sin_default(code.clone_default(came, memory_format=torch.contiguous_format))

        return function

    with fake_process_group(4):
        step = capture_model()
        # Not in place it sends a contiguous copy.
        for launch, found in (
            (collectives.all_reduce_.default, "refused"),
            (collectives.all_reduce.default, "proved"),
        ):
            assert answer(step, make(launch, is_turned=True), make(launch, is_turned=True)) == "proved"
            assert answer(step, make(launch, is_turned=True), make(launch, is_turned=False)) == found
