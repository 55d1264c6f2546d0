"""Tensors that loss_fn reads and that are neither the model's nor the batch's: constants of the graph."""

from __future__ import annotations

import torch

from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep

__all__ = ["check_outside_tensors"]

aten = torch.ops.aten


def check_outside_tensors(graph: CapturedStep) -> None:
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
        is_literal = all(user.target is aten.lift_fresh_copy.default for user in node.users)
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
