"""The checker between passes, tried with passes that are broken on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import fx, nn

from graphpasses.capture import capture_train_step
from graphpasses.errors import PipelineError, VerificationError
from graphpasses.graph import WAIT, InputKind, TrainGraph, argument, is_collective, rules
from graphpasses.graph.rules import Verifier
from graphpasses.passes import DeduplicateShared
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline
from tests.helpers.models import Even, LanguageModel, on_fake_ranks

aten = torch.ops.aten
CULPRIT = "pass 'rewrite' (after deduplicate-shared) "


@dataclass(frozen=True)
class Rewrite(GraphPass):
    """Does whatever the test says."""

    name = "rewrite"
    numerics = Numerics.BITWISE

    edit: Callable[[TrainGraph], object]

    def rewrite(self, graph: TrainGraph) -> int:
        self.edit(graph)
        return 1


@pytest.fixture
def step() -> Iterator[TrainGraph]:
    with on_fake_ranks(Even()) as graph:
        yield graph


def first(graph: TrainGraph, target: Callable[..., object]) -> fx.Node:
    return graph.graph.find_nodes(op="call_function", target=target)[0]


def run(step: TrainGraph, edit: Callable[[TrainGraph], object]) -> TrainGraph:
    return Pipeline((DeduplicateShared(), Rewrite(edit))).run(step, prove=False)


def assert_rejected(step: TrainGraph, edit: Callable[[TrainGraph], object], message: str) -> None:
    with pytest.raises(VerificationError, match="^" + re.escape(CULPRIT + message)):
        run(step, edit)


def test_sound_rewrite_passes(step: TrainGraph) -> None:
    def double_view(graph: TrainGraph) -> None:
        mm = first(graph, aten.mm.default)
        with graph.graph.inserting_before(mm.next):
            again = graph.emit(aten.view.default, (mm, list(mm.meta["val"].shape)), like=mm)
        mm.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)

    assert [report.num_rewrites for report in run(step, double_view).report] == [0, 1]


def test_culprit_is_alone(step: TrainGraph) -> None:
    with pytest.raises(VerificationError, match=r"^pass 'rewrite' removed the loss$"):
        Pipeline((Rewrite(lambda graph: graph.set_output(0, None)),)).run(step)


def test_removed_wait(step: TrainGraph) -> None:
    def remove(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        wait.replace_all_uses_with(argument(wait))
        graph.graph.erase_node(wait)

    assert_rejected(
        step,
        remove,
        "left collective all_gather_into_tensor with 0 waits and 1 other users; expected exactly one wait",
    )


def test_collective_that_nobody_waits_for_is_dead(step: TrainGraph) -> None:
    """Waits and collectives without a reader go, as any other dead code."""

    def orphan(graph: TrainGraph) -> None:
        gather = next(node for node in graph.graph.nodes if is_collective(node))
        with graph.graph.inserting_before(gather.next):
            again = graph.emit(gather.target, gather.args, like=gather)
            graph.emit(WAIT, (again,), like=gather)

    assert run(step, orphan).collectives() == step.collectives()


def test_two_waits(step: TrainGraph) -> None:
    def wait_again(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        user = next(iter(wait.users))
        with graph.graph.inserting_before(user):
            again = graph.emit(WAIT, wait.args, like=wait)
            both = graph.emit(aten.add.Tensor, (wait, again), like=wait)
        user.replace_input_with(wait, both)

    assert_rejected(
        step,
        wait_again,
        "left collective all_gather_into_tensor with 2 waits and 0 other users; expected exactly one wait",
    )


def test_reader_beside_the_wait(step: TrainGraph) -> None:
    def read(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        user = next(iter(wait.users))
        with graph.graph.inserting_before(user):
            both = graph.emit(aten.add.Tensor, (wait, argument(wait)), like=wait)
        user.replace_input_with(wait, both)

    assert_rejected(
        step,
        read,
        "left collective all_gather_into_tensor with 1 waits and 1 other users; expected exactly one wait",
    )


def test_wait_for_no_collective(step: TrainGraph) -> None:
    def wait_for_view(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        user = next(iter(wait.users))
        with graph.graph.inserting_before(user):
            view = graph.emit(torch.ops.aten.alias.default, (wait,), like=wait)
            user.replace_input_with(wait, graph.emit(WAIT, (view,), like=wait))

    assert_rejected(step, wait_for_view, "left wait_tensor_default waiting for alias_default, not a collective")


def test_dropped_gradient(step: TrainGraph) -> None:
    slot = step.gradient_slots()["layers.1.weight"][0]
    assert_rejected(
        step,
        lambda graph: graph.set_output(slot, None),
        "changed the step's gradients: lost layers.1.weight",
    )


def test_gained_gradient() -> None:
    model = nn.Linear(3, 2)
    idle = nn.Parameter(torch.ones(()))
    model.register_parameter("idle", idle)
    step = capture_train_step(lambda model, x: model(x).sum(), model, torch.ones(4, 3))
    slot = step.gradient_slots()["idle"][0]
    with pytest.raises(VerificationError, match=r"^pass 'rewrite' changed the step's gradients: gained idle$"):
        Pipeline((Rewrite(lambda graph: graph.set_output(slot, graph.output_values[0])),)).run(step)


def test_dropped_loss(step: TrainGraph) -> None:
    assert_rejected(step, lambda graph: graph.set_output(0, None), "removed the loss")


def test_removed_inputs() -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("idle", nn.Parameter(torch.ones(())))
    step = capture_train_step(lambda model, x, n: model(x).sum() * n, model, torch.ones(4, 3), 2)
    removed = {item.fqn: index for index, item in enumerate(step.inputs)}
    for fqn, what in (("idle", "inputs"), ("batch[1]", "batch inputs")):
        with pytest.raises(VerificationError) as caught:
            Pipeline((Rewrite(lambda graph, fqn=fqn: graph.remove_inputs([removed[fqn]])),)).run(step)
        assert str(caught.value) == f"pass 'rewrite' changed the step's {what}: lost {fqn}"


def test_removed_input_that_is_read(step: TrainGraph) -> None:
    with pytest.raises(PipelineError, match="^" + re.escape(CULPRIT + "failed: RuntimeError: Tried to erase")):
        run(step, lambda graph: graph.remove_inputs([0]))


def test_undescribed_placeholder(step: TrainGraph) -> None:
    def add(graph: TrainGraph) -> None:
        with graph.graph.inserting_before(graph.placeholders[0]):
            graph.graph.placeholder("extra")

    inputs, outputs = len(step.inputs), len(step.outputs)
    assert_rejected(
        step,
        add,
        f"left {inputs + 1} placeholders and {outputs} outputs; the step describes {inputs} and {outputs}",
    )


def test_undescribed_output(step: TrainGraph) -> None:
    def drop(graph: TrainGraph) -> None:
        graph.graph.output_node().args = (graph.output_values[:-1],)

    inputs, outputs = len(step.inputs), len(step.outputs)
    assert_rejected(
        step,
        drop,
        f"left {inputs} placeholders and {outputs - 1} outputs; the step describes {inputs} and {outputs}",
    )


def test_wrong_value(step: TrainGraph) -> None:
    def widen(graph: TrainGraph) -> None:
        cast = first(graph, aten._to_copy.default)
        with graph.graph.inserting_before(cast):
            other = graph.emit(cast.target, cast.args, {"dtype": torch.float16}, like=cast)
        other.meta["val"] = cast.meta["val"]
        cast.replace_all_uses_with(other)

    assert_rejected(
        step,
        widen,
        "left _to_copy_default with meta['val'] ((3, 8), torch.bfloat16, device(type='cpu')); "
        "it computes ((3, 8), torch.float16, device(type='cpu'))",
    )


def test_reader_of_a_changed_value(step: TrainGraph) -> None:
    """The value of the new node is right, that of its reader is stale."""

    def halve(graph: TrainGraph) -> None:
        cast = first(graph, aten._to_copy.default)
        with graph.graph.inserting_before(cast):
            other = graph.emit(cast.target, cast.args, {"dtype": torch.float16}, like=cast)
        cast.replace_all_uses_with(other)

    assert_rejected(
        step,
        halve,
        "left all_gather_into_tensor with meta['val'] ((12, 8), torch.bfloat16, device(type='cpu')); "
        "it computes ((12, 8), torch.float16, device(type='cpu'))",
    )


def test_value_behind_a_node_changed_in_place(step: TrainGraph) -> None:
    """The changed node's own value is right; its reader, whose call looks as before, is stale."""

    def halve(graph: TrainGraph) -> None:
        cast = first(graph, aten._to_copy.default)
        cast.kwargs = {"dtype": torch.float16}
        cast.meta["val"] = cast.meta["val"].to(torch.float16)

    assert_rejected(step, halve, "left all_gather_into_tensor with meta['val'] ((12, 8), torch.bfloat16")


def test_overwritten_value(step: TrainGraph) -> None:
    def overwrite(graph: TrainGraph) -> None:
        cast = first(graph, aten._to_copy.default)
        cast.meta["val"] = cast.meta["val"].to(torch.float16)

    assert_rejected(step, overwrite, "left _to_copy with meta['val'] ((3, 8), torch.float16")


def test_swapped_gradients(step: TrainGraph) -> None:
    """A gradient must have its parameter's shape."""
    slots = step.gradient_slots()
    a, b = slots["emb.weight"][0], slots["layers.0.weight"][0]

    def swap(graph: TrainGraph) -> None:
        values = graph.output_values
        graph.set_output(a, values[b])
        graph.set_output(b, values[a])

    assert_rejected(step, swap, "")


def test_reordered_batch() -> None:
    """The batch's leaves are handed to the graph in order."""
    step = capture_train_step(
        lambda model, x, y: (model(x) * y).sum(), nn.Linear(3, 3), torch.ones(4, 3), torch.ones(4, 3)
    )

    def swap(graph: TrainGraph) -> None:
        x, y = graph.placeholders[-2:]
        x.prepend(y)
        *kinds, a, b = graph.inputs
        graph.inputs = (*kinds, b, a)

    with pytest.raises(VerificationError, match=r"^pass 'rewrite' changed the step's batch inputs"):
        Pipeline((Rewrite(swap),)).run(step, prove=False)


def test_fixed_signature_keeps_repeated_inputs() -> None:
    """Another runner passes every placeholder: a pass must not remove even a repeated one."""
    with on_fake_ranks(LanguageModel()) as step:
        deduplicated = Pipeline((DeduplicateShared(),)).run(replace(step, fixed_signature=True))
        repeated = [i for i, item in enumerate(step.inputs) if item.fqn == "head.weight"]
        assert len(deduplicated.inputs) == len(step.inputs)
        with pytest.raises(VerificationError, match=r"^pass 'rewrite' "):
            Pipeline((Rewrite(lambda graph: graph.remove_inputs(repeated)),)).run(deduplicated)


def test_call_that_cannot_run(step: TrainGraph) -> None:
    def reshape(graph: TrainGraph) -> None:
        view = first(graph, aten.view.default)
        view.args = (view.args[0], [7, 11])

    with pytest.raises(VerificationError) as caught:
        run(step, reshape)
    message = str(caught.value)
    assert message.startswith(CULPRIT + "left view, which cannot run on its inputs: ")
    assert caught.value.__cause__ is not None


def test_node_without_value(step: TrainGraph) -> None:
    def bare(graph: TrainGraph) -> None:
        mm = first(graph, aten.mm.default)
        with graph.graph.inserting_before(mm):
            mm.replace_all_uses_with(graph.graph.call_function(mm.target, mm.args))

    assert_rejected(step, bare, "left mm_default without meta['val']; make nodes with TrainGraph.emit")


def test_use_before_definition(step: TrainGraph) -> None:
    def swap(graph: TrainGraph) -> None:
        wait = first(graph, WAIT)
        argument(wait).prepend(wait)

    assert_rejected(
        step,
        swap,
        "left a malformed graph: Argument 'all_gather_into_tensor' of Node 'wait_tensor' was used before",
    )


def test_values_are_checked_once(step: TrainGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline stays linear in the graph: only new and changed calls are computed again."""
    checked: list[str] = []
    fake_value = rules.fake_value
    monkeypatch.setattr(rules, "fake_value", lambda node: checked.append(node.name) or fake_value(node))

    def insert(graph: TrainGraph) -> None:
        mm = first(graph, aten.mm.default)
        with graph.graph.inserting_before(mm.next):
            again = graph.emit(aten.detach.default, (mm,), like=mm)
        mm.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)

    mm = first(step, aten.mm.default)
    run(step, lambda graph: None)
    assert checked == []
    run(step, insert)
    assert sorted(checked) == sorted(user.name for user in mm.users)  # emit computed the new one itself


def test_inputs_say_what_they_are(step: TrainGraph) -> None:
    kinds = [item.kind for item in step.inputs if item.is_tensor]
    assert kinds == [InputKind.PARAMETER] * 4 + [InputKind.BATCH] * 2


def test_what_counts_as_changed(step: TrainGraph) -> None:
    """What a pass left as it was is not looked at again; a name, a place or a fake value counts."""
    verifier = Verifier(step)
    mm, last = (
        first(step, aten.mm.default),
        step.graph.find_nodes(op="call_function", target=aten.mm.default)[-1],
    )
    value = mm.meta["val"]
    edits: tuple[tuple[Callable[[], object], bool], ...] = (
        (lambda: None, True),  # never checked before
        (lambda: None, False),
        (lambda: setattr(mm, "name", "another"), True),
        (lambda: None, False),
        (lambda: mm.meta.update(val=value.clone()), True),
        (lambda: mm.meta.update(val=value), True),
        (lambda: last.append(step.graph.create_node("call_function", aten.mm.default, last.args)), True),
    )
    for index, (edit, is_changed) in enumerate(edits):
        edit()
        verifier.check_form(f"edit {index}")
        assert verifier.is_changed == is_changed, index
        if index < len(edits) - 1:
            verifier.check_rules(f"edit {index}")
