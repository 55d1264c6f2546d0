"""Whether a traced step calls what one eager step calls, operator for operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from graphpasses._torch import pytree
from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses._torch.fsdp2_accumulation import pending_gradients
from graphpasses._torch.fsdp2_tracing import fsdp2_state_restored
from graphpasses._torch.in_place_collectives import collectives_with_waits
from graphpasses._torch.operator_calls import FORMULA, OperatorCalls
from graphpasses._torch.operator_facts import TensorFacts, read_tensors
from graphpasses._torch.recorded_operator import Operator
from graphpasses._torch.storage import freed_memory_returned, is_freed
from graphpasses._torch.strides_of_eager import Strides, StridesOfEager
from graphpasses.capture.accumulation_hooks import BEHIND, hooks_set_aside
from graphpasses.capture.traced_strides import are_strides_alike
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph import CapturedStep
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.graph.returned import Returned, loss_of
from graphpasses.graph.several_models import first_model
from graphpasses.identity import IdentityMap, named_state, same_bits
from graphpasses.ops.random_state import read_states
from graphpasses.state.draws import draw_states
from graphpasses.state.keys import key_of
from graphpasses.state.left_tensors import Assigned, LeftTensors, live_state_restored, tensors_kept
from graphpasses.state.model import trained_state
from graphpasses.state.slots import Owner, values_restored

Results = dict[str, torch.Tensor | None]
_States = list[tuple[torch.Generator, torch.Tensor]]

_ANOTHER_RANK = "on another rank, eager and the captured step part; its message says where"
_SAME_OPERATORS = (
    ", though loss_fn calls the same operators: one reads other numbers, e.g. in a long constant that loss_fn makes, "
    "or computes otherwise each time (a function of torch.jit.script does until its third call: run loss_fn and its "
    "backward before), or a formula of autograd looks whether it is traced. Let it be the same at each call, traced "
    "or not, or compute it with other operators; of a step that is captured with check=False, "
    "graphpasses.parity.locate_step finds the operator"
)

_NO_NUMBER = (
    ", which is no tensor and no number: it is built in as it was traced, as the text or the type of a number of "
    ".item(), or was put there in backward. Return the number, and make its text of what the step returns"
)


def record_calls(
    model: nn.Module,
    identity: IdentityMap,
    batch: Sequence[Any],
    *,
    is_mode: bool = True,
    only_undo: bool = False,
) -> OperatorCalls:
    """Returns a record for the operators of a step; the tensors of the model and of the batch have their names in it.

    The model and the batch are real, or as they are traced. ``identity`` is that of the model before it is traced,
    which may part its ties. With ``only_undo`` no operators are recorded, only what the step writes into tensors from
    outside.
    """
    names = {f"batch[{index}]": leaf for index, leaf in enumerate(batch)}
    if not fsdp_groups(model):  # FSDP2 runs a model on other tensors than its parameters
        names |= {identity.canonical(fqn): tensor for fqn, tensor in named_state(model)}
    tensors = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
    return OperatorCalls(model, tensors, is_mode=is_mode, formulas=not is_comparable(model), only_undo=only_undo)


@freed_memory_returned()
def check_step(
    step: CapturedStep, loss_fn: Callable[..., Any], batch: Sequence[Any], traced: Sequence[Operator]
) -> None:
    """Compares the bits of an eager step with the captured step's, and what both call; it leaves all as it was.

    Bits are those of loss, gradients and buffers. Eager takes no other path for being recorded: its bits are those of
    a step that nobody records. What autograd's formulas in C++ call is left to the bits. Where forward calls others
    than were traced, as attention's C++ may, eager runs once more, watched as it was traced, and has to call what was
    traced. Where bits may differ from run to run, operators alone are compared, those of formulas, too. ``step``
    has no update; ``batch`` is what it was captured on, and ``traced`` are the calls that were traced.
    """
    model, outside = step.model, step.snapshot.outside_model
    carried = step.carried.tensors(step.carried.read())
    leaves = [*step.batch_structure.leaves(batch), *carried]
    consensus = RankConsensus.of_graph(step.graph, next(nn.Module.parameters(model)).device)
    agreed = partial(consensus.raised_together, FidelityError(_ANOTHER_RANK))

    def eager(record: AbstractContextManager[Any]) -> Any:
        return _eager(step, loss_fn, batch, record)

    compares = is_comparable(model)
    record = record_calls(model, step.identity, leaves, is_mode=not compares)
    try:
        with agreed():
            with _seeds_refused(step, record) as seeds:
                theirs = run_step(model, lambda: eager(record), outside)
            theirs = {name: record.as_it_is(value) for name, value in theirs.items()}
        with freed_memory_returned():
            record.undo()
        parts = _divergence(traced, record.calls)
        if not consensus.all_ranks([parts is None])[0]:
            again = record
            if compares:
                # Functions of torch's C++ that call others may look whether a mode watches them; the bits say
                # whether that makes a difference.
                again = record_calls(model, step.identity, leaves)
                try:
                    with agreed(), collectives_with_waits():
                        run_step(model, lambda: eager(again), outside)
                finally:
                    again.undo()
            with agreed():
                if parts and (_divergence(traced, again.calls) or _lines(again) != _lines(record)):
                    if not consensus.groups:  # the step may assert that a size is none of which eager goes other ways
                        run_step(model, lambda: step(*step.batch_structure.fresh(batch)), outside)
                    raise FidelityError(parts)
        if compares:
            for generator, state in seeds:
                generator.set_state(state)
            with agreed():
                ours = run_step(model, lambda: step(*step.batch_structure.fresh(batch)), outside)
                for name, value in theirs.items():
                    other = ours.get(name)
                    if value is not other and (value is None or other is None or not same_bits(value, other)):
                        is_plain = name in step.returned.plain or other is None
                        why = _NO_NUMBER if is_plain and name.startswith("result") else _SAME_OPERATORS
                        why += BEHIND if step.hook_order else ""
                        raise FidelityError(f"the captured step computes another {name} than eager{why}")
    finally:
        record.undo()


@contextmanager
def _seeds_refused(step: CapturedStep, record: OperatorCalls) -> Iterator[_States]:
    """Raises if an eager step makes or seeds a generator that the graph holds, and would draw on from.

    Yields the states that the block draws from: others than when the step was captured.
    """
    values = (getattr(step.module, str(n.target)) for n in step.graph.find_nodes(op="get_attr"))
    generators = dict.fromkeys(each for each in values if isinstance(each, torch.Generator))
    states = [(each, each.get_state()) for each in generators]
    others = [(each, each.manual_seed(each.initial_seed() + 1).get_state()) for each, _ in states]
    try:
        yield others
        for generator, other in others:
            drawn = record.state_at_first_use(generator)
            if drawn is None or not torch.equal(drawn, other):
                raise CaptureError(
                    "loss_fn makes or seeds a torch.Generator, and a captured step would draw on from the one of its "
                    "capture. Make and seed it before the step, or give the random numbers in the batch"
                )
    finally:
        for generator, state in states:
            record.undo_to(generator, state)


def run_step(
    model: nn.Module, run: Callable[[], Any], outside: Iterable[Owner] = (), *, calls_hooks: bool = False
) -> Results:
    """Runs a step; returns what it returns and leaves, by what that is, and puts all but written tensors back, also
    what it leaves ``outside``. Unless it ``calls_hooks``, those behind gradients are set aside.
    """
    named = {f"gradient of {fqn!r}": each for fqn, each in trained_state(model).items()}
    with (
        live_state_restored(model),
        fsdp2_state_restored(model),
        values_restored(outside) as changed_outside,
        torch.autograd.set_multithreading_enabled(False),
    ):
        for parameter in named.values():
            parameter.grad = None
        in_modules, assigned = LeftTensors(model), Assigned(model)
        with tensors_kept(model, {}), hooks_set_aside(model, calls_hooks=calls_hooks) as called:
            result = run()
        order = {"order of the hooks behind gradients": called} if called else {}
        buffers = {f"buffer {fqn!r}": each for fqn, each in model.named_buffers()}
        changed = {f"attribute {fqn!r}": each for fqn, each in in_modules.changed().items()}
        changed |= {repr(path): each for path, each in changed_outside().items()}
        left, values = dict[str, Any](), dict[str, Any]()
        for name, value in changed.items():
            leaves, structure = pytree.tree_flatten(value)
            for index, leaf in enumerate(leaves):
                each = name if leaf is value else f"{name}[{index}]"
                (left if torch.is_tensor(leaf) else values)[each] = leaf
            if structure.type is not None:
                values[f"structure of {name}"] = str(structure)
        if freed := next((name for name, each in left.items() if is_freed(each)), None):
            raise CaptureError(f"forward keeps a view of a parameter in {freed}, which FSDP2 frees; keep a clone")
        returned = Returned.values_of(result)
        if freed := next((name for name, each in returned.items() if torch.is_tensor(each) and is_freed(each)), None):
            raise CaptureError(f"loss_fn returns a view of a parameter, {freed}, which FSDP2 frees; return a clone")
        return {
            **{name: each.detach() if torch.is_tensor(each) else _text_of(each) for name, each in returned.items()},
            **{name: each.grad for name, each in named.items()},
            **{f"unreduced gradient of {place!r}": each for place, each in pending_gradients(model).items()},
            **buffers,
            **left,
            **{f"data of {fqn!r}": tensor.detach() for fqn, (tensor, _) in assigned.changed().items()},
            **{name: _text_of(each) for name, each in (values | order).items()},
            **{f"state of the random numbers ({of})": each for of, each in (read_states() | draw_states()).items()},
        }


def _text_of(value: Any) -> torch.Tensor:
    """Returns the text of a Python value, which tells it apart, as a tensor."""
    return torch.tensor([*str(key_of(value)).encode()], dtype=torch.uint8, device="cpu")


def other_strides_of_eager(step: CapturedStep, loss_fn: Callable[..., Any], batch: Sequence[Any]) -> Strides | None:
    """Returns the strides of what an eager step computes, if they are others than were traced on a rank; else None.

    It leaves all as it was.
    """
    record = record_calls(step.model, step.identity, step.batch_structure.leaves(batch), only_undo=True)
    noted = StridesOfEager()
    try:
        with noted:
            run_step(step.model, lambda: _eager(step, loss_fn, batch, record), step.snapshot.outside_model)
    finally:
        record.undo()
    consensus = RankConsensus.of_graph(step.graph, next(nn.Module.parameters(step.model)).device)
    is_same = consensus.all_ranks([not noted.differs_from(step.graph)])[0]
    return None if is_same else noted.found


def _eager(
    step: CapturedStep, loss_fn: Callable[..., Any], batch: Sequence[Any], record: AbstractContextManager[Any]
) -> Any:
    # As in the trace: with FSDP2 the gradients of all leaves, else those of the parameters alone.
    parameters = list(dict.fromkeys(trained_state(step.model).values()))
    values = step.batch_structure.fresh(batch)
    with record:
        result = loss_fn(first_model(step.model), *values)
        loss_of(result).backward(inputs=None if fsdp_groups(step.model) else parameters)
    return result


def is_comparable(model: nn.Module) -> bool:
    """Whether bits of a step can be compared: they are always the same, and no pass has still to order additions."""
    is_simple_fsdp = not fsdp_groups(model) and any(isinstance(each, DTensor) for each in nn.Module.parameters(model))
    return not is_simple_fsdp and has_equal_bits(model)


def has_equal_bits(model: nn.Module) -> bool:
    """Whether the same operators on a model's tensors always give the same bits."""
    is_fake_group = dist.is_initialized() and dist.get_backend() == "fake"
    on_cpu = all(parameter.device.type == "cpu" for parameter in nn.Module.parameters(model))
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_asked = torch.are_deterministic_algorithms_enabled() and not warns_only
    return not is_fake_group and (on_cpu or is_asked)


def why_unchecked(model: nn.Module, batch: Mapping[str, Any]) -> str | None:
    """Returns why there is no eager step to compare a captured one with; None if there is."""
    state = {repr(fqn): tensor for fqn, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, value in {**state, **batch}.items():
        if isinstance(value, torch.Tensor) and any(map(is_fake, read_tensors(value))):
            return f"{name} is a fake tensor"
    for fqn, *aliases in IdentityMap.of(model).parameters:
        if aliases and isinstance(state.get(repr(fqn)), DTensor) and not fsdp_groups(model):
            return f"{fqn!r} is also {aliases[0]!r}, and the tracer gives each name of a DTensor its own gradient"
    return None


def _divergence(traced: Sequence[Operator], eager: Sequence[Operator]) -> str | None:
    """Says by which call two steps differ first, in its operator, or in what it reads and returns; else None."""
    for index, (ours, theirs) in enumerate(itertools.zip_longest(traced, eager)):
        difference = _difference(ours, theirs) if ours and theirs else ""
        if difference is not None:
            here = (theirs or ours).where
            there = f" in {ours.where}" if ours and theirs and str(ours.where) != str(here) else ""
            why = f" ({difference})" if difference else ""
            calls = f"eager calls {_text(theirs)}, the graph {_text(ours)}{there}{why}"
            return (
                f"eager and the captured step part at operator {index + 1}, in {here}: {calls}. Let the model "
                "compute the same whether it is traced or not"
            )
    return None


def _lines(record: OperatorCalls) -> list[str]:
    """Returns the lines, and their modules, that forward runs through."""
    lines = (str(call.where) for call in record.calls if not call.where.in_backward)
    return [where for where, _ in itertools.groupby(lines)]


# Of `a < b` Python asks b first where its class is a subclass of a's, as that of fake tensors is of a tensor's from
# outside; it then is `b > a`.
_MIRRORED = {
    f"aten.{name}.Tensor": f"aten.{other}.Tensor"
    for name, other in {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.items()
}


def _difference(ours: Operator, theirs: Operator) -> str | None:
    found = _difference_in_order(ours, theirs)
    if found is None or ours.operator not in _MIRRORED:
        return found
    mirrored = replace(ours, operator=_MIRRORED[ours.operator], inputs=ours.inputs[::-1])
    return None if _difference_in_order(mirrored, theirs) is None else found


def _difference_in_order(ours: Operator, theirs: Operator) -> str | None:
    if ours.operator != theirs.operator:
        return ""
    if (found := _value_difference(ours.inputs, theirs.inputs)) is not None:
        return found
    found = _value_difference(ours.outputs, theirs.outputs)
    return f"it gives {_value_text(theirs.outputs)} against {_value_text(ours.outputs)}" if found == "" else found


def _value_difference(ours: Any, theirs: Any) -> str | None:
    match ours, theirs:
        case TensorFacts(), TensorFacts():
            return _tensor_difference(ours, theirs)
        case tuple(), tuple() if len(ours) == len(theirs):
            found = (_value_difference(a, b) for a, b in zip(ours, theirs, strict=True))
            return next((each for each in found if each is not None), None)
        case (None, int() | float()):  # a number that depends on data
            return None
        # A result that a backward was told to leave out, e.g. native_batch_norm_backward's.
        case (TensorFacts(), None):
            return None
    same = type(ours) is type(theirs) and (ours == theirs or (ours != ours and theirs != theirs))
    return None if same else f"{theirs} against {ours}"


def _tensor_difference(ours: TensorFacts, theirs: TensorFacts) -> str | None:
    if (ours.dtype, ours.device) != (theirs.dtype, theirs.device) or not _same(ours.shape, theirs.shape):
        return ""
    if not are_strides_alike(theirs.shape, ours.stride, theirs.stride):
        return f"strides {list(theirs.stride)} against {list(ours.stride)}"
    if ours.origin != theirs.origin:
        return f"it reads {_origin(theirs)} against {_origin(ours)}"
    if not _same((ours.offset,), (theirs.offset,)):
        return f"it reads from element {theirs.offset} against {ours.offset}"
    return None


def _same(ours: tuple[int | None, ...], theirs: tuple[int | None, ...]) -> bool:
    return len(ours) == len(theirs) and all(a is None or a == b for a, b in zip(ours, theirs, strict=True))


def _origin(facts: TensorFacts) -> str:
    if isinstance(facts.origin, str):
        return repr(facts.origin)
    made_by = "a formula of autograd" if facts.origin[0] == FORMULA else f"operator {facts.origin[0] + 1}"
    return f"a result of {made_by}"


def _text(call: Operator | None) -> str:
    return "nothing more" if call is None else f"{call.operator}({', '.join(map(_value_text, call.inputs))})"


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value)
