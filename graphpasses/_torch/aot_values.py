"""What the inputs and outputs of AOTAutograd's graphs are."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors


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


def describe_output(desc: Any) -> tuple[int | None, str, str]:
    """Says likewise what an output is, by the position of the input whose gradient it is."""
    whole, attr = _whole(desc)
    of = whole.grad_of if isinstance(whole, descriptors.GradAOTOutput) else None
    return of.idx if isinstance(of, descriptors.PlainAOTInput) else None, attr, str(desc)


def written_input(desc: Any) -> int | None:
    """Returns the position of the input that an output of a graph is written to after it; None if it is none."""
    whole, _ = _whole(desc)
    is_written = isinstance(whole, (descriptors.InputMutationAOTOutput, descriptors.MetadataMutationAOTOutput))
    of = whole.mutated_input if is_written else None
    return of.idx if isinstance(of, descriptors.PlainAOTInput) else None


def adds_gradients(node: fx.Node) -> bool:
    """Whether a node of a joint or a backward graph is autograd's sum of the gradients of two uses of a tensor."""
    return node.target is torch.ops.aten.add.Tensor and node.meta.get("is_gradient_acc", False)


def _whole(desc: Any) -> tuple[Any, str]:
    """Returns what an input or output is, or what it is a part of, and the attribute that the part is there."""
    attr = ""
    while isinstance(desc, (descriptors.SubclassGetAttrAOTInput, descriptors.SubclassGetAttrAOTOutput)):
        desc, attr = desc.base, desc.attr
    return desc, attr
