"""Fused updates write in place where nobody sees it, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("fbgemm_gpu")

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture.torch_compile import compile
from graphpasses.graph import Stage, TrainGraph
from graphpasses.passes import ReinplaceTBEUpdates
from graphpasses.passes.runner import Pipeline
from tests.helpers.kept import Keep, targets, two_tables
from tests.helpers.models import same_bits

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
BOUNDS_CHECK = torch.ops.fbgemm.bounds_check_indices.default
IGNORE = 2  # repairs out-of-range ids without a word

Inner = Literal["aot_eager", "inductor"]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forget_compiled_code")]


def is_functionalized(graph: TrainGraph) -> bool:
    return torch.ops.higher_order.auto_functionalized_v2 in targets(graph)


def num_copies(graph: TrainGraph) -> int:
    """Counts copies of tensors; learning rates are numbers."""
    copies = (aten.clone.default, aten.copy_.default)
    return sum(node.target in copies and node.meta["val"].dim() > 0 for node in graph.graph.nodes)


def run(graph: TrainGraph) -> TrainGraph:
    result = Pipeline((ReinplaceTBEUpdates(),)).run(graph)
    assert not is_functionalized(result)
    return result


# ---- functions that check ids, which writes them --------------------------------------------------------


def check(ids: Tensor, *, rows: Tensor | None = None) -> None:
    """Sets ids that are not below 5 (table 0: the first two ids) or 6 to zero."""
    rows = torch.tensor([5, 6]) if rows is None else rows
    size = ids.size(0)
    torch.ops.fbgemm.bounds_check_indices(rows, ids, torch.tensor([0, 2, size]), IGNORE, torch.zeros(1).long())


def new_value(ids: Tensor) -> Tensor:
    check(ids)
    return ids * 2


def old_value_before(ids: Tensor) -> Tensor:
    old = ids * 2
    check(ids)
    return old


def old_value_cloned(ids: Tensor) -> tuple[Tensor, Tensor]:
    old = ids.clone()
    check(ids)
    return old * 2, ids * 2


def a_part(ids: Tensor) -> Tensor:
    check(ids[1:])
    return ids * 2


def a_view_read_later(ids: Tensor) -> Tensor:
    view = ids.view(2, 2)
    check(ids)
    return view * 2


def twice(ids: Tensor) -> tuple[Tensor, Tensor]:
    check(ids, rows=torch.tensor([90, 95]))
    between = ids * 2
    check(ids)
    return between, ids * 2


def its_own(ids: Tensor) -> Tensor:
    own = ids * 1
    check(own)
    return own * 2


def its_own_returned(ids: Tensor) -> Tensor:
    own = ids * 1
    check(own)
    return own


def its_own_and_old(ids: Tensor) -> tuple[Tensor, Tensor]:
    own = ids * 1
    kept = own.view(2, 2).clone()
    check(own)
    return own, kept


def rows_from_ids(ids: Tensor) -> Tensor:
    """What pytorch#198031 is about: an argument is read while another one is written."""
    check(ids, rows=ids[:2].clone())
    return ids * 2


FUNCTIONS = {
    # function: clones and copies that stay when graphs run as they are
    new_value: 0,
    old_value_before: 0,
    old_value_cloned: 1,  # the function's own
    a_part: 0,
    a_view_read_later: 0,
    twice: 0,
    its_own: 0,
    its_own_returned: 0,
    its_own_and_old: 1,
    rows_from_ids: 1,
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_values_are_those_of_eager(function: Callable[[Tensor], Any], inner: Inner) -> None:
    ids = torch.tensor([4, 96, 2, 91])
    eager, compiled = ids.clone(), ids.clone()
    keep = Keep()
    expected = function(eager)
    actual = compile(function, pipeline=Pipeline((ReinplaceTBEUpdates(), keep)), inner=inner)(compiled)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert same_bits(compiled, eager)
    (graph,) = keep.graphs
    assert not is_functionalized(graph)
    assert BOUNDS_CHECK in targets(graph)
    if inner == "aot_eager":
        assert num_copies(graph) == FUNCTIONS[function]


# ---- graphs, rewritten without running -------------------------------------------------------------------


def captured(function: Callable[[Tensor], Any]) -> TrainGraph:
    keep = Keep()
    compile(function, pipeline=Pipeline((keep,)), inner="aot_eager")(torch.tensor([4, 96, 2, 91]))
    (graph,) = keep.graphs
    assert is_functionalized(graph)
    return graph


def placeholder_and_call(graph: TrainGraph) -> tuple[Any, Any]:
    (placeholder,) = graph.placeholders
    target = torch.ops.higher_order.auto_functionalized_v2
    (call,) = graph.graph.find_nodes(op="call_function", target=target)
    return placeholder, call


def notes(graph: TrainGraph) -> tuple[str, ...]:
    assert graph.report is not None
    return graph.report["reinplace-tbe-updates"].notes


def test_old_value_that_is_read_later_is_kept() -> None:
    graph = captured(new_value)
    placeholder, _ = placeholder_and_call(graph)
    (multiply,) = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    multiply.replace_input_with(multiply.args[0], placeholder)
    result = run(graph)
    assert num_copies(result) == 2
    assert notes(result) == (
        "fbgemm.bounds_check_indices.default writes a copy of ids: mul reads the old value afterwards",
    )


def test_shape_of_the_old_value_may_be_read_later() -> None:
    graph = captured(new_value)
    placeholder, call = placeholder_and_call(graph)
    (multiply,) = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    with graph.graph.inserting_before(multiply):
        size = graph.emit(aten.sym_size.int, (placeholder, 0), like=call)
    multiply.args = (multiply.args[0], size)
    assert num_copies(run(graph)) == 0


@pytest.mark.parametrize("is_merged", [False, True])
def test_views_of_a_merged_value_are_read_later(is_merged: bool) -> None:
    graph = captured(its_own)
    _, call = placeholder_and_call(graph)
    own, later = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    with graph.graph.inserting_before(call):
        again = graph.emit(own.target, own.args, like=own)
        view = graph.emit(aten.view.default, (again, [2, 2]), like=own)
        part = graph.emit(aten.select.int, (view, 0, 0), like=own)
    with graph.graph.inserting_before(later):
        old = graph.emit(aten.sum.default, (part,), like=own)
    later.args = (later.args[0], old)
    if is_merged:
        graph.merge(again, own)
    assert num_copies(run(graph)) == is_merged


@pytest.mark.parametrize("waits_later", [False, True])
def test_collective_reads_until_it_is_waited_for(waits_later: bool) -> None:
    graph = captured(new_value)
    placeholder, call = placeholder_and_call(graph)
    (multiply,) = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    with graph.graph.inserting_before(call):
        launched = graph.emit(c10d.all_to_all_single.default, (placeholder, [4], [4], "0"), like=call)
    with graph.graph.inserting_before(multiply if waits_later else call):
        waited = graph.emit(c10d.wait_tensor.default, (launched,), like=call)
    multiply.args = (multiply.args[0], waited)
    with fake_process_group(1):
        result = run(graph)
    assert num_copies(result) == (2 if waits_later else 0)
    assert bool(notes(result)) == waits_later


def test_input_that_shall_not_change_is_copied() -> None:
    graph = captured(new_value)
    (write_back,) = graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
    graph.graph.erase_node(write_back)
    result = run(graph)
    assert num_copies(result) == 1
    assert "its owner keeps the old value" in notes(result)[0]


@pytest.mark.parametrize("old", [False, True])
def test_returned_memory_of_an_input_is_not_shared(old: bool) -> None:
    graph = captured(new_value)
    placeholder, _ = placeholder_and_call(graph)
    (write_back,) = graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
    graph.set_output(0, placeholder if old else write_back.args[1])
    result = run(graph)
    assert num_copies(result) == 2
    assert f"the graph returns the {'old' if old else 'new'} value" in notes(result)[0]


def test_other_libraries_calls_stay() -> None:
    with torch.library._scoped_library("graphpasses_test", "FRAGMENT") as library:
        library.define("increment(Tensor(a!) x) -> ()")
        library.impl("increment", lambda x: None, "CompositeExplicitAutograd")

        def function(ids: Tensor) -> Tensor:
            torch.ops.graphpasses_test.increment(ids)
            return ids * 2

        graph = captured(function)
    result = Pipeline((ReinplaceTBEUpdates(),)).run(graph)
    assert result.report["reinplace-tbe-updates"].num_rewrites == 0
    assert result.module.code == graph.module.code


# ---- models ----------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two tables of width 4 and a head; ``use`` says what else reads the tables."""

    def __init__(self, optimizer: str, use: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tbe = two_tables(optimizer)
        self.head = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(10, 4))
        self.use = use

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        table = self.tbe.weights_host[:40].view(10, 4)
        first = (table.sigmoid() * table * self.scale).sum() if "read before" in self.use else 0.0
        out = self.head(self.tbe(ids, offsets))
        if "look up twice" in self.use:
            out = out + self.head(self.tbe(ids.flip(0), offsets))
        last = (table.sigmoid() * table * self.scale).sum() if self.use == "read after" else 0.0
        return first + out.square().mean() + last


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 7, (6,), generator=generator), torch.tensor([0, 2, 3, 3, 6])


def state(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.state_dict().values(), *gradients]


def assert_same_state(model: nn.Module, other: nn.Module) -> None:
    assert all(same_bits(a, b) for a, b in zip(state(model), state(other), strict=True))


@pytest.mark.parametrize(
    ("optimizer", "use"),
    [
        ("EXACT_SGD", "look up twice"),
        ("EXACT_ADAGRAD", "look up twice"),
        ("EXACT_ROWWISE_ADAGRAD", "look up twice"),
        ("EXACT_ROWWISE_ADAGRAD", "read before"),
        ("EXACT_ROWWISE_ADAGRAD", "read after"),
        ("EXACT_ROWWISE_ADAGRAD", ""),
    ],
)
def test_tables_are_updated_in_place(optimizer: str, use: str) -> None:
    eager, model = Model(optimizer, use), Model(optimizer, use)
    keep = Keep()
    compiled = compile(model, pipeline=Pipeline((ReinplaceTBEUpdates(), keep)), inner="aot_eager", fullgraph=True)
    for step in range(3):
        eager(*batch(step)).backward()
        compiled(*batch(step)).backward()
    assert_same_state(model, eager)
    forward, backward = keep.graphs
    assert forward.stage is Stage.FORWARD
    assert num_copies(backward) == (2 if use == "read before" else 0)
    updates = [target for target in targets(backward) if "backward_codegen" in str(target)]
    assert len(updates) == (2 if use == "look up twice" else 1)
    assert not is_functionalized(forward)
    assert not is_functionalized(backward)


def test_tables_are_updated_in_place_under_inductor() -> None:
    """The dense layers' rounding is Inductor's, so it is compared with Inductor alone."""
    alone, model = (Model("EXACT_ADAGRAD", "read before, and look up twice") for _ in range(2))
    keep = Keep()
    compiled_alone = compile(alone, pipeline=Pipeline(()))
    compiled = compile(model, pipeline=Pipeline((ReinplaceTBEUpdates(), keep)))
    for step in range(3):
        compiled_alone(*batch(step)).backward()
        compiled(*batch(step)).backward()
    assert_same_state(model, alone)
    assert not any(map(is_functionalized, keep.graphs))
    assert num_copies(keep.graphs[1]) == 2


def test_two_graphs_share_a_table() -> None:
    """Autograd takes a copy back into a table for a change that the other graph's backward must not see."""
    models = [Model("EXACT_ADAGRAD") for _ in range(2)]
    eager = copy.deepcopy(models)
    for pair in (models, eager):
        pair[1].tbe = pair[0].tbe
    pipeline = Pipeline((ReinplaceTBEUpdates(),))
    compiled = [compile(model, pipeline=pipeline, inner="aot_eager") for model in models]
    for step in range(3):
        sum(model(*batch(step + index)) for index, model in enumerate(eager)).backward()
        sum(model(*batch(step + index)) for index, model in enumerate(compiled)).backward()
    for model, other in zip(models, eager, strict=True):
        assert_same_state(model, other)


def test_lookups_without_gradients() -> None:
    model = Model("EXACT_SGD")
    keep = Keep()
    compiled = compile(model, pipeline=Pipeline((ReinplaceTBEUpdates(), keep)), inner="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert same_bits(compiled(*batch(0)), model(*batch(0)))
    (graph,) = keep.graphs
    assert not is_functionalized(graph)
