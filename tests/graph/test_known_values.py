"""What verification knows about values, while a pass emits, copies, replaces and merges calls."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from graphpasses.capture import capture_train_step
from graphpasses.graph import CapturedStep
from graphpasses.graph.known_values import KnownValues
from graphpasses.graph.nodes import storages

aten = torch.ops.aten


@pytest.fixture
def step() -> CapturedStep:
    return capture_train_step(lambda model, x: model(x).relu().sum(), nn.Linear(3, 2), torch.ones(4, 3))


def unknown(step: CapturedStep, known: KnownValues) -> list[str]:
    return [node.name for node in known.unknown(step.graph)]


def test_everything_captured_is_known(step: CapturedStep) -> None:
    assert unknown(step, step.watch_values()) == []
    assert len(unknown(step, KnownValues())) == sum(node.op == "call_function" for node in step.graph.nodes)


def test_changed_calls_and_readers_of_changed_values_are_unknown(step: CapturedStep) -> None:
    known = step.watch_values()
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    addmm = relu.args[0]
    relu.target = aten.sigmoid.default
    assert unknown(step, known) == ["relu"]
    known.record(relu)
    addmm.meta["val"] = addmm.meta["val"][:1]
    assert unknown(step, known) == ["addmm", "relu"]


def test_a_call_that_reads_another_node_is_unknown(step: CapturedStep) -> None:
    known = step.watch_values()
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    addmm = relu.args[0]
    with step.graph.inserting_after(addmm):
        clone = step.emit(aten.clone.default, (addmm,), like=addmm)
    assert unknown(step, known) == []
    relu.args = (clone,)
    assert unknown(step, known) == ["relu"]
    known.record(relu)
    relu.kwargs = {"x": 1}
    assert unknown(step, known) == ["relu"]


def test_a_call_that_writes_what_it_reads_is_looked_at_again(step: CapturedStep) -> None:
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with step.graph.inserting_before(relu):
        clone = step.emit(aten.clone.default, relu.args, like=relu)
        written = step.emit(aten.relu_.default, relu.args, like=relu)
    known = step.watch_values()
    written.args = (clone,)
    assert unknown(step, known) == [written.name]


def test_a_copy_of_a_call_is_known_if_the_call_is(step: CapturedStep) -> None:
    known = step.watch_values()
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    addmm = relu.args[0]
    with step.graph.inserting_before(relu.next):
        again = step.emit_copy(addmm, {})
        copy = step.emit_copy(relu, {addmm: again})
    assert copy.args == (again,)
    assert copy.meta["val"] is relu.meta["val"]
    assert copy.meta.keys() == relu.meta.keys()
    assert unknown(step, known) == []
    relu.target = aten.sigmoid.default
    with step.graph.inserting_before(relu.next):
        another = step.emit_copy(relu, {})
    assert unknown(step, known) == [relu.name, another.name]


def test_replace(step: CapturedStep) -> None:
    known = step.watch_values()
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    readers, value = [*relu.users], relu.meta["val"]
    with step.graph.inserting_before(relu):
        new = step.emit(aten.clamp_min.default, (relu.args[0], 0), like=relu)
    assert new.meta["val"] is not value
    step.replace(relu, new)
    assert relu not in step.graph.nodes
    assert [*new.users] == readers
    assert new.meta["val"] is value  # whose storage the values of views share
    assert unknown(step, known) == []


def test_replace_by_another_shape_is_unknown(step: CapturedStep) -> None:
    known = step.watch_values()
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with step.graph.inserting_before(relu):
        new = step.emit(aten.sum.dim_IntList, (relu.args[0], [0]), like=relu)
    step.replace(relu, new)
    assert unknown(step, known)[0] == new.name  # whose fake value is the old one, which it does not compute


def test_merge(step: CapturedStep) -> None:
    known = step.watch_values()
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    readers = [*relu.users]
    with step.graph.inserting_before(relu):
        kept = step.emit(relu.target, relu.args, like=relu)
        value = kept.meta["val"]
    step.merge(relu, kept)
    assert relu not in step.graph.nodes
    assert [*kept.users] == readers
    assert kept.meta["val"] is value
    assert unknown(step, known) == []


def test_views_of_what_was_merged_lie_in_the_memory_of_what_was_kept(step: CapturedStep) -> None:
    known = step.watch_values()
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with step.graph.inserting_after(relu):
        view = step.emit(aten.view.default, (relu, [-1]), like=relu)
    with step.graph.inserting_after(view):
        parts = step.emit(aten.split.Tensor, (view, 3), like=relu)
    with step.graph.inserting_after(parts):
        part = step.emit(operator.getitem, (parts, 1), like=relu)
    with step.graph.inserting_after(part):
        copy = step.emit(aten.clone.default, (part,), like=relu)
    with step.graph.inserting_before(relu):
        kept = step.emit(relu.target, relu.args, like=relu)
    before, cloned = storages(relu), storages(copy)
    assert storages(view, parts, part) == before != storages(kept)
    offset = part.meta["val"].storage_offset()
    step.merge(relu, kept)
    assert storages(view) == storages(parts) == storages(part) == storages(kept)
    assert part.meta["val"].storage_offset() == offset == 3
    assert storages(copy) == cloned
    assert unknown(step, known) == []


def test_readers_of_what_was_merged_with_another_shape_are_unknown(step: CapturedStep) -> None:
    known = step.watch_values()
    relu = step.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    readers = [reader.name for reader in relu.users]
    with step.graph.inserting_before(relu):
        kept = step.emit(aten.sum.dim_IntList, (relu.args[0], [0]), like=relu)
    step.merge(relu, kept)
    assert unknown(step, known) == readers
