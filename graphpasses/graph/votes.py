"""What the ranks of a captured step decide together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from graphpasses._torch.fake_mode import is_fake
from graphpasses._torch.group_ranks import mesh_group_names, named_group
from graphpasses.graph.nodes import collective_group

__all__ = ["Votes"]


class Votes:
    """Asks the ranks with which a step communicates; each must ask at the same time.

    Args:
        groups: names of its process groups, along the axes of a mesh in turn.
        device: of the model, on which its groups communicate.

    Example:
        >>> Votes((), torch.device("cpu")).all_ranks([True, False])  # it communicates with no rank
        [True, False]
    """

    def __init__(self, groups: Iterable[str], device: torch.device) -> None:
        self.groups = tuple(dict.fromkeys(groups))
        self._device = device

    @classmethod
    def of_graph(cls, graph: fx.Graph, device: torch.device) -> Votes:
        """Returns the votes of the ranks with which a graph communicates.

        Args:
            graph: of the step.
            device: of the model.
        """
        return cls((str(g) for g in map(collective_group, graph.nodes) if g is not None), device)

    @classmethod
    def of_model(cls, model: nn.Module) -> Votes:
        """Returns the votes of the ranks that hold the shards of a model's parameters; on fake tensors none is asked.

        Args:
            model: the model.
        """
        parameters = list(model.parameters())
        meshes = dict.fromkeys(each.device_mesh for each in parameters if isinstance(each, DTensor))
        if any(map(is_fake, map(_local, parameters))):
            meshes = {}
        groups = (str(name) for mesh in meshes for name in mesh_group_names(mesh))
        return cls(groups, next(iter(parameters), torch.empty(0)).device)

    def all_ranks(self, flags: list[bool]) -> list[bool]:
        """Returns which flags are True on all ranks.

        Args:
            flags: this rank's, as many on each.
        """
        if not self.groups:
            return flags
        votes = torch.tensor(flags, dtype=torch.int32, device=self._device)
        for group in self.groups:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=named_group(group))
        return [bool(vote) for vote in votes.tolist()]

    @contextmanager
    def raised_together(self, error: Exception) -> Iterator[None]:
        """Raises on all ranks if the block raises on one, so that none goes on to wait for it.

        Args:
            error: for the ranks where the block does not raise.
        """
        try:
            yield
        except Exception:
            self.all_ranks([False])
            raise
        if not self.all_ranks([True])[0]:
            raise error


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
