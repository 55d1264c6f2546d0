"""Activations that go to the CPU in forward and come back in backward: the proof follows them, and what is freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import graphpasses as gp
from graphpasses.errors import ProofError
from graphpasses.graph import CapturedStep

pytest.importorskip("torchtitan.experiments.graph_trainer.cpu_offload")  # loads the operators

ao, aten = torch.ops.ao, torch.ops.aten


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def offloaded(change: Callable[[fx.Graph, fx.Node, fx.Node], None]) -> tuple[CapturedStep, CapturedStep]:
    """Returns a step, and one whose first activation is offloaded; ``change`` gets that and what comes back."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    before = gp.capture_train_step(loss_of, model, torch.ones(2, 3))
    after = before.copy()
    graph = after.graph
    (tanh,) = graph.find_nodes(op="call_function", target=aten.tanh.default)
    (reader,) = graph.find_nodes(op="call_function", target=aten.tanh_backward.default)
    last = max((user for user in tanh.users if user is not reader), key=[*graph.nodes].index)
    value = tanh.meta["val"]
    with graph.inserting_after(last):
        cpu = after.emit(ao.offload.default, (tanh,), like=tanh)
    with graph.inserting_after(cpu):
        arrived = after.emit(ao.wait_tensor.default, (cpu, tanh, last), like=cpu)
    with graph.inserting_before(reader):
        layout = value.device, [*value.size()], [*value.stride()]
        back = after.emit(ao.reload.default, (arrived, *layout), like=tanh)
        back = after.emit(ao.wait_tensor.default, (back, arrived), like=tanh)
    reader.replace_input_with(reader.args[1], back)  # tanh, or what is it
    change(graph, tanh, back)
    return before, after


def test_what_comes_back_is_what_went() -> None:
    certificate = gp.prove(*offloaded(lambda graph, tanh, back: None))
    assert not certificate.unproved
    assert "offloading" in certificate.axioms


def test_what_was_freed_is_not_read() -> None:
    def read_again(graph: fx.Graph, tanh: fx.Node, back: fx.Node) -> None:
        (reader,) = graph.find_nodes(op="call_function", target=aten.tanh_backward.default)
        reader.replace_input_with(back, tanh)

    with pytest.raises(ProofError, match="wait_tensor_default frees tanh, which tanh_backward reads"):
        gp.prove(*offloaded(read_again))


def test_another_tensor_that_comes_back_is_told() -> None:
    def swap(graph: fx.Graph, tanh: fx.Node, back: fx.Node) -> None:
        back.args[0].args[0].args[0].replace_input_with(tanh, tanh.args[0])

    with pytest.raises(ProofError, match=r"changes the gradient of '0\.weight'"):
        gp.prove(*offloaded(swap))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_bits_stay(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (4, 6), device="cuda").to(dtype).t()
    expected = tensor.clone()
    cpu = ao.wait_tensor(ao.offload(tensor), tensor)
    assert not tensor.untyped_storage().size()
    back = ao.wait_tensor(ao.reload(cpu, torch.device("cuda"), [6, 4], [1, 6]), cpu)
    assert torch.equal(back, expected)
    assert back.stride() == (1, 6)
