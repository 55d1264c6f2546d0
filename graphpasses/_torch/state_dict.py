"""What a state dict holds beside tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["module_versions"]


def module_versions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the versions of modules, by FQN, that ``state_dict()`` hung on its result; the dict itself.

    Example:
        >>> import torch
        >>> dict(module_versions(torch.nn.Linear(2, 2).state_dict())), module_versions({})
        ({'': {'version': 1}}, {})
    """
    versions: dict[str, Any] = getattr(state, "_metadata", {})
    return versions
