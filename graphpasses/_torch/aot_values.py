"""What the inputs and outputs of AOTAutograd's graphs are, and in which strides a backward gets the tangents.

AOTAutograd copies the gradient of an output into the strides that the output has. Where these overlap, as those of
the windows of ``Tensor.unfold``, elements were written over each other: the gradients were wrong, without a word.
torch takes another way for outputs of ``expand`` alone (torch 2.13, also with Inductor). And eager copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

from graphpasses._torch.schemas import is_tensor_subclass
from graphpasses._torch.symbols import example_size


def is_tangent(node: fx.Node) -> bool:
    """Whether a node of an AOTAutograd graph is the placeholder of an output's gradient, or of a part of one."""
    desc, _ = _whole(node.meta.get("desc") if node.op == "placeholder" else None)
    return isinstance(desc, descriptors.TangentAOTInput)


def describe_input(node: fx.Node) -> tuple[int | None, str, str]:
    """Says what a placeholder of an AOTAutograd graph is.

    Returns the position of the Dynamo input that it is or belongs to (None if it is something else), the attribute of
    a tensor subclass that it carries (``""`` for the tensor itself), and a description.
    """
    desc = node.meta.get("desc")
    whole, attr = _whole(desc)
    index = whole.idx if isinstance(whole, descriptors.PlainAOTInput) else None
    return index, attr, node.name if desc is None else str(desc)


def tangent_of(node: fx.Node) -> int | None:
    """Returns the place of the Dynamo output whose gradient a placeholder of a backward graph is; None of others."""
    desc = node.meta.get("desc")
    output = desc.output if isinstance(desc, descriptors.TangentAOTInput) else None
    return output.idx if isinstance(output, descriptors.PlainAOTOutput) else None


class Output(NamedTuple):
    """An output of an AOTAutograd graph."""

    value: Any  # a node, or None
    of: int | None  # the position of the Dynamo input whose gradient it is; None if it is something else
    written: int | None  # that of the one to which it is written after the graph
    attr: str  # as of an input
    text: str  # likewise


def described_outputs(graph: fx.Graph) -> list[Output]:
    """Says what each output of an AOTAutograd graph is."""
    output = graph.output_node()
    values: Any = output.args[0]
    found = []
    for value, desc in zip(values, output.meta.get("desc") or [None] * len(values), strict=True):
        whole, attr = _whole(desc)
        is_written = isinstance(whole, (descriptors.InputMutationAOTOutput, descriptors.MetadataMutationAOTOutput))
        gradient_of = whole.grad_of if isinstance(whole, descriptors.GradAOTOutput) else None
        places = (gradient_of, whole.mutated_input if is_written else None)
        of_input, written = (of.idx if isinstance(of, descriptors.PlainAOTInput) else None for of in places)
        found.append(Output(value, of_input, written, attr, str(desc)))
    return found


def adds_gradients(node: fx.Node) -> bool:
    """Whether a node of a joint or a backward graph is autograd's sum of the gradients of two uses of a tensor."""
    return node.target is torch.ops.aten.add.Tensor and node.meta.get("is_gradient_acc", False)


def _whole(desc: Any) -> tuple[Any, str]:
    """Returns what an input or output is, or what it is a part of, and the attribute that the part is there."""
    attr = ""
    while isinstance(desc, (descriptors.SubclassGetAttrAOTInput, descriptors.SubclassGetAttrAOTOutput)):
        desc, attr = desc.base, desc.attr
    return desc, attr


@contextmanager
def gradients_whole(*, copied: bool) -> Iterator[None]:
    """In the block, which traces, gradients of outputs that overlap themselves are taken to be contiguous.

    Unless they are ``copied``, the backward graph gets all others in the strides that they arrive in.
    """
    original: Any = MemoryFormatMeta.from_tensor

    def from_tensor(tensor: Tensor, *args: Any, **options: Any) -> Any:
        overlaps = overlaps_itself(tensor)
        if overlaps:
            return MemoryFormatMeta(memory_format=torch.contiguous_format)
        if copied or overlaps is None or is_tensor_subclass(tensor):
            return original(tensor, *args, **options)
        return MemoryFormatMeta(size=mock.ANY, stride=mock.ANY)  # equal to all

    with mock.patch.object(MemoryFormatMeta, "from_tensor", staticmethod(from_tensor)):
        yield


def overlaps_itself(tensor: Tensor) -> bool | None:
    """Whether elements of a tensor may lie in one place; None where only running tells.

    Source: ``FunctionsManual.cpp``, ``_maybe_overlapping_memory``.
    """
    if tensor.layout is not torch.strided:
        return False
    sizes, strides = ([example_size(each) for each in of_tensor] for of_tensor in (tensor.shape, tensor.stride()))
    if any(num_unknown for _, num_unknown in (*sizes, *strides)):
        return None
    last = 0
    for (stride, _), (size, _) in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= last:
                return True
            last += stride * (size - 1)
    return False
