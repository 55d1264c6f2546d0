"""The settings of a model's FSDP2 groups that a captured step has built in, and whether they still are so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from graphpasses._torch.fsdp2 import find_outdated, find_pending
from graphpasses._torch.fsdp2_settings import group_name, group_settings
from graphpasses.errors import CaptureError
from graphpasses.graph.votes import Votes

__all__ = ["check_group_settings", "check_pending", "check_unsharded", "check_unsharded_on_all_ranks"]


def check_group_settings(groups: Sequence[Any], captured: Sequence[dict[str, Any]]) -> None:
    """Raises if a setting of an FSDP2 group is not what it was when the step was captured.

    Args:
        groups: the model's.
        captured: their settings then.

    Raises:
        CaptureError: it names the group, the setting and both values.
    """
    for group, before, now in zip(groups, captured, group_settings(groups), strict=True):
        if now == before:
            continue
        name = next(name for name in before if before[name] != now[name])
        raise CaptureError(
            f"{name} of FSDP2 group {group_name(group)!r} was {before[name]} when the step was captured, and is "
            f"{now[name]} now; capture the step again, or undo the change"
        )


def check_pending(groups: Sequence[Any]) -> None:
    """Raises if FSDP2 keeps gradients that its next reduction would add.

    All ranks raise alike: a group whose ranks kept different gradients could not reduce them in eager either.

    Args:
        groups: the model's.

    Raises:
        CaptureError: eager would add them to the step's gradients; the captured step would not.
    """
    if (found := find_pending(groups)) is not None:
        group, is_reduced = found
        setting = "set_requires_all_reduce(False)" if is_reduced else "set_requires_gradient_sync(False)"
        raise CaptureError(
            f"FSDP2 group {group_name(group)!r} holds gradients of an earlier backward that ran under {setting}, and "
            "eager would reduce them with this step's; a captured step would leave them out. Run the last microbatch "
            "eagerly too, or call the captured step for all microbatches: it reduces each, and .grad gets the sum"
        )


def check_unsharded(groups: Sequence[Any]) -> None:
    """Raises if a parameter changed since an eager forward unsharded it.

    Args:
        groups: the model's.

    Raises:
        CaptureError: eager would train on with what the parameter was.
    """
    if (fqn := find_outdated(groups)) is not None:
        raise CaptureError(
            f"parameter {fqn!r} changed while it was unsharded, as a forward without a backward leaves it (an "
            "evaluation before optimizer.step()): eager FSDP2 would train on with the old values. Call reshard() on "
            "its fully_sharded module before it changes"
        )


def check_unsharded_on_all_ranks(model: nn.Module, groups: Sequence[Any]) -> None:
    """Does what :func:`check_unsharded` does, and raises on all ranks if it does on one.

    Args:
        model: the model.
        groups: its FSDP2 groups; the same of them are unsharded on all ranks.
    """
    if any(group.is_unsharded for group in groups):
        elsewhere = CaptureError(
            "on another rank, a parameter changed while it was unsharded; its message says which"
        )
        with Votes.of_model(model).raised_together(elsewhere):
            check_unsharded(groups)
