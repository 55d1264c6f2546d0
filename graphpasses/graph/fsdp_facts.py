"""The settings of a model's FSDP2 groups that a captured step has built in, and whether they still are so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphpasses._torch.fsdp2_settings import group_name, group_settings
from graphpasses.errors import CaptureError

__all__ = ["check_group_settings"]


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
