"""What a captured step would train otherwise than eager: refused by name, before, while and after it is traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from graphpasses._torch import pytree
from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.module_hooks import is_compiled
from graphpasses.capture.guards import user_line
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.graph.nodes import source_line
from graphpasses.identity import walk_modules
from graphpasses.state.model import check_gradient_hooks

__all__ = [
    "kept_tensors_refused",
    "named_call",
    "other_memory_refused",
    "refuse_collectives_in_place",
    "refuse_model",
    "refuse_other_memory",
    "refuse_outside_tensors",
    "refuse_recurrent_kernel",
    "refuse_sparse_gradients",
]


def refuse_model(model: nn.Module) -> None:
    """Raises if a captured step would train a model otherwise than eager does.

    Args:
        model: the model that is to be captured.

    Raises:
        CaptureError: a module is wrapped or sharded by what works in hooks that a capture does not see
            (DistributedDataParallel, DataParallel, FSDP1), is compiled, or is on the meta
            device; or a hook waits for a parameter's gradient.
    """
    for fqn, module in walk_modules(model):
        if reason := _reject_reason(module):
            raise CaptureError(f"{f'module {fqn!r}' if fqn else 'the model'} {reason}")
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise CaptureError(
                f"parameter or buffer {fqn!r} is on the meta device; materialise the model "
                "(to_empty and initialise) before capturing its step"
            )
    for fqn, parameter in model.named_parameters():
        check_gradient_hooks(fqn, parameter)


def _reject_reason(module: nn.Module) -> str | None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(module, nn.parallel.DistributedDataParallel):
        return (
            "is a DistributedDataParallel, which reduces gradients in hooks that a captured step does not run: each "
            "rank would train on its own. Capture its .module, sharded with fully_shard, or use "
            "torch.compile(model, backend='graphpasses')"
        )
    if isinstance(module, nn.DataParallel):
        return "is a DataParallel, which copies itself at each call; capture its .module, on one process per device"
    if isinstance(module, FullyShardedDataParallel):
        return (
            "is a FullyShardedDataParallel (FSDP1), which gathers and reduces in hooks that a captured step does not "
            "run; shard the plain model with fully_shard"
        )
    if is_compiled(module):
        return "is compiled; capture the module that torch.compile was given, before it is compiled"
    return None


@contextmanager
def kept_tensors_refused(model: nn.Module) -> Iterator[None]:
    """Raises if the block, which runs forward, replaces a parameter or buffer, or keeps a tensor in an attribute."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    known = {id(tensor) for _, tensor in _attributes(model)}
    try:
        yield
    except RuntimeError as error:
        if "_apply(): Couldn't swap" not in str(error):  # as Module.to says of a parameter that is traced
            raise
        raise CaptureError(
            f"forward converts or moves a module, as .to() and .half() do, which replaces its parameters: {error}. "
            "Do it before the step"
        ) from error
    known |= {
        id(tensor) for tensor in (*model.parameters(), *model.buffers())
    }  # an RNN's list of its weights
    for fqn, buffer in model.named_buffers(remove_duplicate=False):
        if buffer is not buffers.get(fqn, buffer):
            raise CaptureError(
                f"forward replaces buffer {fqn!r}, and a captured step would not: each call would read the old one. "
                "Write it in place, e.g. with buffer.copy_(...)"
            )
    for fqn, tensor in _attributes(model):
        if id(tensor) not in known:
            raise CaptureError(
                f"forward keeps a tensor in the attribute {fqn!r}, and a captured step would not: what reads it "
                "later would find an old one. Compute it in forward, or register it as a buffer and write it in place"
            )


@contextmanager
def other_memory_refused(model: nn.Module) -> Iterator[None]:
    """Raises if the block, which is traced, assigns to the ``data`` of a tensor, which is no operator of a graph."""
    names = {id(tensor): fqn for fqn, tensor in (*model.named_parameters(), *model.named_buffers())}
    data: Any = torch.Tensor.data
    thread = threading.get_ident()

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if threading.get_ident() != thread and not is_fake(tensor):
            data.__set__(tensor, value)  # code that has nothing to do with the step
            return
        name = names.get(id(tensor))
        what = f"{name!r}" if name else f"a tensor of shape {list(tensor.shape)}, {tensor.dtype},"
        raise CaptureError(f"{what} {_OTHER_MEMORY}, with .data = ... at {user_line()}{_IN_PLACE}")

    replace: Any = mock.patch.object
    with replace(torch.Tensor, "data", property(data.__get__, assign)):
        yield


_OTHER_MEMORY = "gets other memory while loss_fn runs"
_IN_PLACE = (
    ". A captured step would not follow: it would read and write the old memory. Write the tensor in place, e.g. "
    "with tensor.copy_(...) under torch.no_grad()"
)


def refuse_other_memory(graph: CapturedStep) -> None:
    """Raises if the step gives a tensor another's memory, as ``Tensor.set_`` does.

    Args:
        graph: the captured step.

    Raises:
        CaptureError: it does.
    """
    for node in graph.graph.nodes:
        if getattr(node.target, "overloadpacket", None) is torch.ops.aten.set_:
            raise CaptureError(f"a tensor {_OTHER_MEMORY}, with {named_call(node)}{_IN_PLACE}")


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in modules' own attributes, also in lists, tuples and dicts, with the attribute's FQN."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        yield f"{fqn}.{name}".lstrip("."), leaf


def refuse_recurrent_kernel(graph: CapturedStep) -> None:
    """Raises if an LSTM runs in oneDNN, whose backward cannot be run from a graph.

    Args:
        graph: the captured step.

    Raises:
        CaptureError: one does.
    """
    if graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer_backward.default):
        raise CaptureError(
            "the model has an LSTM that runs in oneDNN, whose backward cannot be run from a graph; turn oneDNN off "
            "in both runs, with torch.backends.mkldnn.set_flags(False)"
        )


def refuse_sparse_gradients(graph: CapturedStep) -> None:
    """Raises if a gradient is sparse, which a captured step cannot add to a parameter's.

    Args:
        graph: the captured step.

    Raises:
        CaptureError: one is, e.g. of ``nn.Embedding(sparse=True)``.
    """
    values = graph.output_values
    for fqn, slots in graph.gradient_slots().items():
        for slot in slots:
            if values[slot] is not None and values[slot].meta["val"].layout is not torch.strided:
                raise CaptureError(
                    f"the gradient of {fqn!r} is sparse, and a captured step fills dense ones; make the embedding "
                    "with sparse=False"
                )


def refuse_collectives_in_place(graph: CapturedStep) -> None:
    """Raises if the step communicates in place, for which a graph has no wait.

    Args:
        graph: the captured step.

    Raises:
        CaptureError: it does.
    """
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") == "c10d":
            raise CaptureError(
                f"loss_fn communicates in place: {named_call(node)}, as torch.distributed.all_reduce and its like "
                "do. A graph has no wait for it, so what it brings could be read too early. Communicate before or "
                "after the step"
            )


def refuse_outside_tensors(graph: CapturedStep) -> None:
    """Refuses trainable tensors from outside, whose gradients the step would not compute, and notes the others.

    The graph keeps the tensor objects: it sees what is written into them, and not that a name stands for another.

    Args:
        graph: the captured step; gets a note.

    Raises:
        CaptureError: loss_fn reads a trainable tensor that is no part of the model.

    Example:
        >>> head = nn.Linear(2, 1)
        >>> graphpasses.capture_train_step(lambda model, x: head(model(x)).sum(), nn.Linear(2, 2), torch.ones(1, 2))
        Traceback (most recent call last):
        graphpasses.errors.CaptureError: loss_fn reads a trainable tensor of shape [1, 2], torch.float32, that is ...
    """
    outside: dict[int, torch.Tensor] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph.module, str(node.target))
        # What forward makes of numbers, as torch.tensor([1.0]) does, is fresh at each call.
        is_literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if isinstance(value, torch.Tensor) and not is_literal:
            outside[id(value)] = value
    for value in outside.values():
        if value.requires_grad:
            raise CaptureError(
                f"loss_fn reads a trainable tensor of {_describe(value)}, that is no part of the model; a captured "
                "step would not compute its gradient. Make it part of the model, e.g. capture an nn.ModuleDict of "
                "both, or detach it"
            )
    if outside:
        shapes = "; ".join(_describe(value) for value in list(outside.values())[:3])
        graph.note(
            f"loss_fn reads {len(outside)} tensors from outside the model and the batch ({shapes}"
            f"{'; …' if len(outside) > 3 else ''}): the step keeps these objects, and sees what is written into "
            "them, but not other tensors under their names"
        )


def _describe(value: torch.Tensor) -> str:
    return f"shape {list(value.shape)}, {value.dtype}"


def named_call(node: fx.Node) -> str:
    """Returns the operator of a call, and the line of the user's code that it comes from."""
    line = source_line(node)
    return f"{node.target} ({line})" if line else str(node.target)
