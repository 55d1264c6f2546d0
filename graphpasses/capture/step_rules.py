"""What a traced step must not do: small named rules, run in this order once the step is read.

A rule returns why a step is refused, or None. What is refused before or while a step is traced is in
``refusals.py`` and ``guards.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphpasses._torch.schemas import inner_names, is_tensor_subclass
from graphpasses.capture.guards import is_literal
from graphpasses.capture.random_state import RandomCalls, find_random_fault
from graphpasses.capture.refusals import OTHER_MEMORY, WRITE_IN_PLACE
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.graph.nodes import memories, named_call
from graphpasses.identity import named_state

StepRule = Callable[[CapturedStep, RandomCalls], str | None]
aten = torch.ops.aten


def refuse_step(step: CapturedStep, calls: RandomCalls) -> None:
    """Raises if a step breaks a rule; ``calls`` is what it did with random numbers while it was traced."""
    for rule in RULES:
        if (reason := rule(step, calls)) is not None:
            raise CaptureError(reason)


def _recurrent_kernel(step: CapturedStep, _: RandomCalls) -> str | None:
    if not step.graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer_backward.default):
        return None
    return (
        "the model has an LSTM that runs in oneDNN, whose backward cannot be run from a graph; turn oneDNN off in "
        "both runs, with torch.backends.mkldnn.set_flags(False)"
    )


def _collectives_in_place(step: CapturedStep, _: RandomCalls) -> str | None:
    for node in step.graph.nodes:
        if getattr(node.target, "namespace", "") == "c10d":
            return (
                f"loss_fn communicates in place: {named_call(node)}. A graph has no wait for it, so what it brings "
                "could be read too early. Call all_reduce, all_gather, all_gather_into_tensor, reduce_scatter, "
                "reduce_scatter_tensor, all_to_all_single or scatter of the module torch.distributed, without "
                "async_op, or communicate before or after the step"
            )
    return None


def _other_memory(step: CapturedStep, _: RandomCalls) -> str | None:
    for node in step.graph.nodes:
        if getattr(node.target, "overloadpacket", None) is aten.set_:
            return f"a tensor {OTHER_MEMORY}, with {named_call(node)}{WRITE_IN_PLACE}"
    return None


def _sparse_gradients(step: CapturedStep, _: RandomCalls) -> str | None:
    values = step.output_values
    for fqn, slots in step.gradient_slots().items():
        layouts = (values[slot].meta["val"].layout for slot in slots if values[slot] is not None)
        if any(layout is not torch.strided for layout in layouts):
            return (
                f"the gradient of {fqn!r} is sparse, and a captured step fills dense ones; make the embedding with "
                "sparse=False"
            )
    return None


def _outside_tensors(step: CapturedStep, _: RandomCalls) -> str | None:
    """Refuses trainable tensors, whose gradients the step would not compute, and notes the others.

    The graph keeps the tensor objects: it sees what is written into them.
    """
    outside: dict[int, torch.Tensor] = {}
    for node in step.graph.find_nodes(op="get_attr"):
        value = getattr(step.module, str(node.target))
        if isinstance(value, torch.Tensor) and not is_literal(node):
            outside[id(value)] = value
    own = {each: fqn for fqn, tensor in named_state(step.model) for each in memories(_parts(tensor))}
    for fqn in [own[each] for value in outside.values() for each in memories(value) if each in own]:
        return (
            f"loss_fn reads memory of {fqn!r} by a tensor of its own, as a view, or a shard, that was made outside: "
            "a captured step would compute no gradient by it, nor know when it changes. Make it in loss_fn, of the "
            "parameters of the model that loss_fn is given"
        )
    shapes = [f"shape {list(value.shape)}, {value.dtype}" for value in outside.values()]
    for shape, value in zip(shapes, outside.values(), strict=True):
        if value.requires_grad:
            return (
                f"loss_fn reads a trainable tensor of {shape}, that is no part of the model; a captured step would "
                "not compute its gradient. Name its model (capture_train_step(..., others=(other,))), or detach "
                "it"
            )
    if outside:
        step.note(
            f"loss_fn reads {len(outside)} tensors from outside the model and the batch ({'; '.join(shapes[:3])}"
            f"{'; …' if len(outside) > 3 else ''}): the step keeps these objects, and sees what is written into "
            "them, but not other tensors under their names"
        )
        step.snapshot = step.snapshot.with_tensors(outside.values())
    return None


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns what holds a tensor's values: of a sharded one this rank's shard."""
    return [getattr(tensor, name) for name in inner_names(tensor)] if is_tensor_subclass(tensor) else [tensor]


RULES: tuple[StepRule, ...] = (
    _recurrent_kernel,
    _collectives_in_place,
    _other_memory,
    _sparse_gradients,
    find_random_fault,
    _outside_tensors,
)
