"""One placeholder per tensor, one unshard chain per parameter."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import graphpasses
from graphpasses.capture import capture_train_step
from graphpasses.graph import InputKind, TrainGraph
from graphpasses.passes import DeduplicateShared
from graphpasses.passes.runner import Pipeline
from tests.helpers.models import Even, LanguageModel, Reused, collective_calls, on_fake_ranks, same_bits

aten = torch.ops.aten


def run(graph: TrainGraph) -> tuple[int, TrainGraph]:
    result = Pipeline((DeduplicateShared(),)).run(graph)
    return result.report["deduplicate-shared"].num_rewrites, result


@pytest.mark.parametrize("hybrid", [False, True])
def test_tied_weight_is_read_and_gathered_once(hybrid: bool) -> None:
    with on_fake_ranks(LanguageModel(), hybrid=hybrid) as captured:
        before = captured.collectives()
        num_rewrites, graph = run(captured)
        # The placeholder of the head's local tensor and its all-gather; that of its mesh may have no reader.
        assert num_rewrites in (2, 3)
        assert captured.collectives() == before
        assert graph.collectives() == before | {"all_gather_into_tensor": before["all_gather_into_tensor"] - 1}
        assert "head.weight" not in {item.fqn for item in graph.inputs}
        assert [item for item in captured.inputs if item.fqn != "head.weight"] == list(graph.inputs)
        assert len(graph.gradient_slots()["emb.weight"]) == 2  # gradients are another pass's


def test_module_that_runs_three_times_is_gathered_once() -> None:
    with on_fake_ranks(Reused()) as captured:
        _, graph = run(captured)
        # block: 7 parameters; mixers: one tied weight and three biases; embedding; head: 2
        assert captured.collectives()["all_gather_into_tensor"] == 7 * 3 + 6 + 3
        assert graph.collectives()["all_gather_into_tensor"] == len(graph.parameters) == 14
        assert graph.collectives()["reduce_scatter_tensor"] == captured.collectives()["reduce_scatter_tensor"]


def test_second_run_changes_nothing() -> None:
    with on_fake_ranks(Reused()) as captured:
        _, once = run(captured)
        num_rewrites, twice = run(once)
        assert num_rewrites == 0
        assert twice.module.code == once.module.code


def test_nothing_shared() -> None:
    with on_fake_ranks(Even()) as captured:
        num_rewrites, graph = run(captured)
        assert num_rewrites == 0
        assert graph.module.code == captured.module.code
        assert graph.report["deduplicate-shared"].notes == ()


def test_same_on_every_rank() -> None:
    calls = []
    for rank in (0, 3):
        with on_fake_ranks(Reused(), rank=rank) as captured:
            _, graph = run(captured)
            calls.append(collective_calls(graph))
    assert calls[0] == calls[1]


def test_fixed_signature_keeps_repeated_placeholders_unread() -> None:
    with on_fake_ranks(LanguageModel()) as captured:
        num_rewrites, graph = run(replace(captured, fixed_signature=True))
        assert num_rewrites in (2, 3)
        assert graph.inputs == captured.inputs
        unread = [item.fqn for item, node in zip(graph.inputs, graph.placeholders, strict=True) if not node.users]
        assert unread.count("head.weight") == 2
        assert run(graph)[0] == 0


def test_regathered_parameter_is_kept() -> None:
    """A chain of backward was made on purpose: the forward's values were freed."""
    with on_fake_ranks(Even()) as captured:
        graph = captured.copy()
        gather = graph.graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
        )[1]
        (wait,) = gather.users
        reader = graph.graph.find_nodes(op="call_function", target=aten.tanh_backward.default)[-1]
        with graph.graph.inserting_before(reader):
            again = graph.emit(gather.target, gather.args, like=gather)
            again.meta["autograd_backward"] = True
            waited = graph.emit(wait.target, (again,), like=wait)
            waited.meta["autograd_backward"] = True
            value = graph.emit(aten.sum.default, (waited,), like=wait)
            scaled = graph.emit(aten.mul.Tensor, (reader.args[0], value), like=wait)
        reader.replace_input_with(reader.args[0], scaled)
        assert run(graph)[1].collectives()["all_gather_into_tensor"] == 5
        for node in (again, waited):
            node.meta["autograd_backward"] = False
        assert run(graph)[1].collectives()["all_gather_into_tensor"] == 4


def test_chain_that_is_written_is_left_alone() -> None:
    """Eager would gather the second use afresh; one copy would carry the first one's writes."""
    with on_fake_ranks(LanguageModel()) as captured:
        graph = captured.copy()
        gathers = graph.graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
        )
        (wait,) = gathers[0].users
        assert gathers[0].args[0].args[0] in graph.placeholders or gathers[0].args[0].op == "call_function"
        with graph.graph.inserting_before(wait.next):
            graph.emit(aten.mul_.Tensor, (wait, 2.0), like=wait)
        _, result = run(graph)
        before = graph.collectives()["all_gather_into_tensor"]
        # Nor are views of what is written taken for views of what is not.
        assert graphpasses.prove(graph, result)
        notes = result.report["deduplicate-shared"].notes
        assert notes
        assert all("or what it is made of, is written in place: left alone" in note for note in notes)
        assert result.collectives()["all_gather_into_tensor"] in (before, before - 1)


def test_tied_buffers_get_one_placeholder() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.full((3,), 2.0))
            self.register_buffer("again", self.scale)

    model = Model()
    captured = capture_train_step(
        lambda model, x: (model.weight * model.scale * model.again * x).sum(), model, torch.ones(3)
    )
    assert [item.fqn for item in captured.inputs if item.kind is InputKind.BUFFER] == ["scale", "again"]
    num_rewrites, graph = run(captured)
    assert [item.fqn for item in graph.inputs if item.kind is InputKind.BUFFER] == ["scale"]
    assert num_rewrites == 1
    assert graph(torch.ones(3)).item() == 12.0


def test_repeated_casts_count_as_rewrites() -> None:
    """A report of no rewrites promises an unchanged graph."""
    model = nn.Linear(3, 3, bias=False)
    eager = copy.deepcopy(model)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        once = x.bfloat16() @ model.weight.to(torch.bfloat16)
        return (once @ model.weight.to(torch.bfloat16)).float().square().mean()

    captured = capture_train_step(loss_fn, model, torch.ones(2, 3))
    num_rewrites, graph = run(captured)
    assert (num_rewrites == 0) == (graph.module.code == captured.module.code)
    loss = loss_fn(eager, torch.ones(2, 3))
    loss.backward()
    assert same_bits(graph(torch.ones(2, 3)), loss)
    assert same_bits(model.weight.grad, eager.weight.grad)
