"""What torch-level calls do beside computing their value."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # registers them
import torch.nn.functional as F
from torch import fx

from graphpasses.analysis.effects import (
    UNKNOWN_GROUP,
    Effects,
    is_written,
    launches_collective,
    operator_effects,
    torch_call_effects,
)

c10d, aten = torch.ops._c10d_functional, torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Returns a call of x and y."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = torch.ones(2)
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return make(target, (x, y, *args), kwargs)


@pytest.mark.parametrize(
    ("node", "written"),
    [
        (call("add"), ""),
        (call("add_"), "x"),
        (call("__iadd__"), "x"),
        (call("__add__"), ""),
        (call(operator.add), ""),
        (call(operator.iadd), "x"),
        (call(operator.and_), ""),
        (call(operator.setitem, 1), "x"),
        (call(torch.relu_), "x"),
        (call(F.dropout, True, True), "x"),
        (call(F.dropout, True, False), ""),
        (call(F.relu, inplace=True), "x"),
        (call(aten.add.Tensor), ""),
        (call(aten.add), ""),
        (call(aten.add_.Tensor), "x"),
        (call(torch.ops.higher_order.cond), "xy"),
        (call(F.embedding), ""),
        (call(F.embedding, None, 1.0), "y"),
        (call(F.batch_norm, training=True), "y"),
        (call(F.batch_norm), ""),
        (call(F.instance_norm), "y"),  # its default
        (call(F.instance_norm, use_input_stats=False), ""),
        (call(torch._fused_sgd_), "xy"),
        (call(torch.batch_norm), ""),  # of x, with weight y
    ],
)
def test_written_inputs(node: fx.Node, written: str) -> None:
    assert "".join(dict.fromkeys(map(str, torch_call_effects(node).writes))) == written


def test_outs_are_written() -> None:
    node = call(torch.add)
    node.kwargs = {"out": node.args[1]}
    assert [str(other) for other in torch_call_effects(node).writes] == ["y"]


@pytest.mark.parametrize("target", [F.dropout, F.dropout2d, torch.rand_like, "bernoulli_", aten.dropout.default])
def test_random(target: Any) -> None:
    assert torch_call_effects(call(target)).has_hidden_state


@pytest.mark.parametrize("target", [F.relu, F.conv2d, torch.sum, "add_", operator.add, aten.add.Tensor])
def test_not_random(target: Any) -> None:
    assert not torch_call_effects(call(target)).has_hidden_state


def test_collectives() -> None:
    assert launches_collective(call(c10d.all_to_all_single))
    assert launches_collective(call(c10d.all_reduce.default))
    assert not launches_collective(call(c10d.wait_tensor))
    assert not launches_collective(call(aten.native_group_norm))  # its groups are not of processes
    assert not launches_collective(call(torch.sum))


def test_graphs_inside_are_seen() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x)

    node = call(torch.ops.higher_order.cond)
    module = torch.nn.Module()
    module.body = fx.symbolic_trace(Inner())
    with node.graph.inserting_before(node):
        node.args = (node.graph.get_attr("body"),)
    fx.GraphModule(module, node.graph)
    assert torch_call_effects(node).has_hidden_state
    assert not launches_collective(node)


def test_context() -> None:
    enter = call(torch.amp.autocast_mode._enter_autocast)
    enter.args = ("cpu", torch.bfloat16, True, None)
    leave = enter.graph.call_function(torch.amp.autocast_mode._exit_autocast, (enter,))
    switch = enter.graph.call_function(torch._C._set_grad_enabled, (True,))
    changes = [torch_call_effects(node).changes_context for node in (enter, leave, call(torch.sum), switch)]
    assert changes == [True, True, False, False]


def test_groups() -> None:
    reduce = call(c10d.all_reduce.default)
    reduce.args = (reduce.args[0], "sum", "3")
    assert operator_effects(reduce).group == "3"
    assert torch_call_effects(reduce).group == "3"
    reduce.args = (reduce.args[0], "sum")
    assert torch_call_effects(reduce).group == UNKNOWN_GROUP


@pytest.mark.parametrize(
    ("target", "reads", "writes", "shares"),
    [
        (aten.add.Tensor, "xy", "", ""),
        (aten.add_.Tensor, "xy", "x", "x"),
        (aten.copy_.default, "y", "x", "x"),
        (aten.detach.default, "", "", "x"),
        (aten.sym_numel.default, "", "", ""),
        (operator.getitem, "", "", "x"),
        (c10d.wait_tensor.default, "xy", "", "x"),
        (torch.ops.higher_order.auto_functionalized_v2, "xy", "", "xy"),
        (torch.ops.higher_order.cond, "xy", "xy", "xy"),
    ],
)
def test_memory_of_operators(target: Any, reads: str, writes: str, shares: str) -> None:
    effects = operator_effects(call(target))
    found = ["".join(map(str, nodes)) for nodes in (effects.reads, effects.writes, effects.shares)]
    assert found == [reads, writes, shares]


@pytest.mark.parametrize(
    ("target", "writes"),
    [
        (aten.native_batch_norm.default, True),
        (aten.batch_norm_update_stats.default, True),
        (aten.batch_norm_gather_stats_with_counts.default, True),  # of SyncBatchNorm
        (aten._native_batch_norm_legit.default, True),  # says so
        (aten._native_batch_norm_legit_functional.default, False),
        (aten.native_batch_norm_backward.default, False),
    ],
)
def test_running_statistics(target: Any, writes: bool) -> None:
    graph = fx.Graph()
    node = graph.call_function(target, tuple(graph.placeholder(each.name) for each in target._schema.arguments))
    written = [str(each) for each in operator_effects(node).writes]
    assert written == ["running_mean", "running_var"] * writes


def test_batch_norms_write_what_their_schemas_do_not_say() -> None:
    """What the test above says, by running the kernels."""
    x, mean, variance = torch.arange(8.0).view(4, 2), torch.zeros(2), torch.ones(2)
    aten.batch_norm_update_stats(x, mean, variance, 0.5)
    assert mean.tolist() == [1.5, 2.0]
    aten.native_batch_norm(x, None, None, mean, variance, True, 0.5, 1e-5)
    assert mean.tolist() == [2.25, 3.0]


def test_hidden_state_of_operators() -> None:
    assert operator_effects(call(aten.bernoulli.default)).has_hidden_state
    assert operator_effects(call(torch.ops.higher_order.cond)).has_hidden_state
    assert not operator_effects(call(aten.add_.Tensor)).has_hidden_state


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.1, True)])
def test_attention_draws_for_its_dropout_alone(dropout: float, draws: bool) -> None:
    attention = call(aten._scaled_dot_product_flash_attention_for_cpu.default, "v", dropout)
    assert operator_effects(attention).has_hidden_state == draws


def test_what_is_no_call_does_nothing() -> None:
    assert operator_effects(fx.Graph().placeholder("x")) == Effects()


def chain(*targets: object) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for target in targets:
        nodes.append(graph.call_function(target, (nodes[-1], *([[-1]] if target == aten.view.default else []))))
    return graph, nodes


def test_mutation_is_seen_through_views() -> None:
    _, nodes = chain(aten.view.default, aten.relu_.default)
    assert is_written(nodes[0])
    assert is_written(nodes[1])
    _, nodes = chain(aten.view.default, aten.relu.default)
    assert not is_written(nodes[0])
    _, nodes = chain(aten.clone.default, aten.relu_.default)
    assert not is_written(nodes[0])
