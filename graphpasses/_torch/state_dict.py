"""What checkpoints and copies of TorchRec's sharded modules hold: parts of tensors, versions, process groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._C import _distributed_c10d as _c10d
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

__all__ = ["ShardedTensor", "groups_are_kept", "module_versions"]


def module_versions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the versions of modules, by FQN, that ``state_dict()`` hung on its result; the dict itself."""
    versions: dict[str, Any] = getattr(state, "_metadata", {})
    return versions


@contextmanager
def groups_are_kept() -> Iterator[None]:
    """Lets ``copy.deepcopy`` keep process groups, as TorchRec does for the classes of NCCL and gloo alone."""
    nccl = getattr(_c10d, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {}))
    with (
        mock.patch.object(_c10d, "ProcessGroupNCCL", nccl, create=True),
        mock.patch.object(_c10d.ProcessGroup, "__deepcopy__", lambda group, memo: group, create=True),
    ):
        yield
