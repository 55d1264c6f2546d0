"""What a traced step must not do: small named rules, run in this order once the step is read.

A rule returns why a step is refused, or None. What is refused before or while a step is traced is in
``refusals.py`` and ``guards.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.operator_facts import read_tensors
from graphpasses._torch.schemas import is_operator
from graphpasses._torch.storage import memories
from graphpasses.analysis.effects import written_inputs
from graphpasses.capture.random_state import find_random_fault
from graphpasses.capture.refusals import OTHER_MEMORY, WRITE_IN_PLACE
from graphpasses.capture.slices import is_literal
from graphpasses.capture.trace import Trace
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep, OutputKind
from graphpasses.graph.nodes import named_call, storages
from graphpasses.identity import named_state
from graphpasses.state.left_tensors import read_before, values_of

StepRule = Callable[[CapturedStep, Trace], str | None]
aten = torch.ops.aten


def refuse_step(step: CapturedStep, trace: Trace) -> None:
    """Raises if a step that was read from a trace breaks a rule."""
    for rule in RULES:
        if (reason := rule(step, trace)) is not None:
            raise CaptureError(reason)


def _calls(step: CapturedStep, _: Trace) -> str | None:
    for node in step.graph.nodes:
        if getattr(node.target, "namespace", "") == "c10d":
            return (
                f"loss_fn communicates in place: {named_call(node)}. A graph has no wait for it, so what it brings "
                "could be read too early. Call all_reduce, all_gather, all_gather_into_tensor, reduce_scatter, "
                "reduce_scatter_tensor, all_to_all_single or scatter of torch.distributed, without async_op, or "
                "communicate before or after the step"
            )
        if getattr(node.target, "overloadpacket", None) is aten.set_:
            return f"a tensor {OTHER_MEMORY}, with {named_call(node)}{WRITE_IN_PLACE}"
    return None


def _branches(step: CapturedStep, _: Trace) -> str | None:
    """Refuses a graph in the graph that reads a tensor of the step by a variable: autograd did not see that."""
    for name, module in step.module.named_modules():
        for node in module.graph.find_nodes(op="get_attr") if isinstance(module, fx.GraphModule) and name else ():
            if is_fake(getattr(module, str(node.target))):
                return (
                    "loss_fn calls an operator of torch with a function, as torch.cond, that reads a tensor by a "
                    "variable of its own, and the captured step would compute no gradient by it. Write `if`, or "
                    "torch.where"
                )
    return None


def _shared_memory(step: CapturedStep, _: Trace) -> str | None:
    """Refuses what is assigned to a tensor's ``data`` and is also another tensor's memory: of the next call, too."""
    known = storages(*(node for node in step.graph.nodes if node.op in ("placeholder", "get_attr")))
    # Those that replace a tensor come first: of what is assigned twice the second is found.
    for item, node in zip(step.outputs, step.output_values, strict=True):
        if item.kind in (OutputKind.LEFT, OutputKind.MEMORY) and node is not None:
            if item.kind is OutputKind.MEMORY and storages(node) & known:
                return f"loss_fn assigns memory of another tensor to the .data of {item.fqn!r}; assign a clone of it"
            known |= storages(node)
    return None


def _sparse_gradients(step: CapturedStep, _: Trace) -> str | None:
    for fqn, found in step.gradients().items():
        if any(gradient.meta["val"].layout is not torch.strided for gradient in found.values()):
            return (
                f"the gradient of {fqn!r} is sparse, and a captured step fills dense ones; make the embedding with "
                "sparse=False"
            )
    return None


def _random_fault(step: CapturedStep, trace: Trace) -> str | None:
    return f"loss_fn {trace.reads.drawn}" if trace.reads.drawn else find_random_fault(step, trace.seeds)


def _numbers_of_either_kind(step: CapturedStep, _: Trace) -> str | None:
    """Refuses a max or min of an int and a float, of which Python returns either as it is, where its kind shows."""
    either: set[fx.Node] = set()
    for node in step.graph.nodes:
        kinds = {_EITHER if each in either else _kind_of_number(each) for each in node.args} - {None}
        if node.target in (torch.sym_max, torch.sym_min):
            either |= {node} if len(kinds) > 1 or _EITHER in kinds else set()
        elif node.target in _KEEP_KINDS:
            # SymFloats make floats of constants, of which whole ones may have been ints.
            kinds -= {float} if any(type(each) is float and each.is_integer() for each in node.args) else set()
            either |= {node} if _EITHER in kinds and float not in kinds else set()
        elif not either.isdisjoint(node.all_input_nodes) and (node.op == "output" or is_operator(node.target)):
            values = [each.meta["val"] for each in node.all_input_nodes if each not in either]
            has_floats = any(map(_has_fractions, values))
            if node.op == "output" or not (has_floats or node.kwargs.get("dtype")):
                use = (
                    "returns it" if node.op == "output" else f"gives it to {named_call(node)}, whose dtype it decides"
                )
                return (
                    f"loss_fn takes the max or min of an int and a float, and {use}. In Python that is either, and "
                    "in a captured step a float; take it of floats, as max(1.0, n)"
                )
    return None


def _has_fractions(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _kind_of_number(value: Any) -> type | None:
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    kinds = {torch.SymInt: int, torch.SymFloat: float}
    return kinds.get(type(value), type(value) if type(value) in (int, float) else None)


_EITHER = int | float
# Functions that give an int of ints, and a float of a float.
_KEEP_KINDS = frozenset(
    (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.pos, abs)
)


def find_written_groups(step: CapturedStep, memory: Mapping[str, tuple[int, set[Any]]]) -> dict[int, str]:
    """Returns by index each FSDP2 group of which a step writes a parameter, or its shard, and its FQN.

    ``memory`` is that of parameters, and the index of their group, by FQNs.
    """
    owner = {each: (index, fqn) for fqn, (index, held) in memory.items() for each in held}
    written: dict[int, str] = {}
    for node in step.graph.nodes if owner else ():
        for index, fqn in (owner[each] for each in storages(*written_inputs(node)) & owner.keys()):
            written.setdefault(index, fqn)
    return written


def _outside_tensors(step: CapturedStep, trace: Trace) -> str | None:
    """Refuses tensors from outside whose gradients the step would not compute."""
    outside = outside_tensors(step)
    own = {each: fqn for fqn, tensor in named_state(step.model) for each in memories([*read_tensors(tensor)])}
    for fqn in [own[each] for value in outside for each in memories(value) if each in own]:
        return (
            f"loss_fn reads memory of {fqn!r} by a tensor of its own, as a view, or a shard, that was made outside: "
            "a captured step would compute no gradient by it, nor know when it changes. Make it in loss_fn, of the "
            "parameters of the model that loss_fn is given"
        )
    left = {item.fqn for item in step.outputs if item.kind is OutputKind.LEFT}
    read = {each for value in outside for each in memories(value)}
    for fqn, value in values_of(step.model).items():
        is_past = fqn in left - step.left_values.places.keys()  # else `Reads` has seen it
        if is_past and isinstance(value, torch.Tensor) and not read.isdisjoint(memories(value)):
            return read_before(fqn)
    trained = {id(leaf) for leaf in trace.trained_outside}
    for value in (each for each in outside if each.is_leaf and is_fake(each.grad)):  # by a backward in backward
        trained.add(id(value))
        value.grad = None
    for value in outside:
        # A leaf that is read under no_grad alone, as a target network's, gets none in eager either.
        if id(value) in trained or (value.requires_grad and not value.is_leaf):
            return (
                f"loss_fn reads a trainable tensor of {_layout(value)}, that is no part of the model; a captured "
                "step would not compute its gradient. Name its model (capture_train_step(..., others=(other,))), or "
                "detach it"
            )
    return None


def outside_tensors(step: CapturedStep) -> list[torch.Tensor]:
    """Returns the tensors beside the model and the batch that a step reads; its graph keeps the objects."""
    values = {
        node.target: getattr(step.module, str(node.target))
        for node in step.graph.find_nodes(op="get_attr")
        if not is_literal(node)
    }
    return [*{id(each): each for each in values.values() if isinstance(each, torch.Tensor)}.values()]


def note_outside(outside: Sequence[torch.Tensor]) -> str:
    """Says that a step keeps tensors from outside."""
    shapes = "; ".join(map(_layout, outside[:3])) + ("; …" if len(outside) > 3 else "")
    return (
        f"loss_fn reads {len(outside)} tensors from outside the model and the batch ({shapes}): the step keeps these "
        "objects, and sees what is written into them, but not other tensors under their names"
    )


def _layout(value: torch.Tensor) -> str:
    return f"shape {list(value.shape)}, {value.dtype}"


RULES: tuple[StepRule, ...] = (
    _calls,
    _branches,
    _shared_memory,
    _sparse_gradients,
    _random_fault,
    _numbers_of_either_kind,
    _outside_tensors,
)
