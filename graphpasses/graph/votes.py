"""What the ranks of a captured step decide together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import fx

from graphpasses._torch.group_ranks import named_group
from graphpasses.graph.nodes import collective_group

__all__ = ["Votes"]


class Votes:
    """Asks the ranks with which a step communicates; each must ask at the same time.

    Args:
        graph: of the step.
        device: of the model, on which its groups communicate.

    Example:
        >>> Votes(fx.Graph(), torch.device("cpu")).all_ranks([True, False])  # it communicates with no rank
        [True, False]
    """

    def __init__(self, graph: fx.Graph, device: torch.device) -> None:
        self.groups = list(dict.fromkeys(g for g in map(collective_group, graph.nodes) if g is not None))
        """Names of the groups, along the axes of a mesh in turn."""
        self._device = device

    def all_ranks(self, flags: list[bool]) -> list[bool]:
        """Returns which flags are True on all ranks.

        Args:
            flags: this rank's, as many on each.
        """
        if not self.groups:
            return flags
        votes = torch.tensor(flags, dtype=torch.int32, device=self._device)
        for group in self.groups:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=named_group(str(group)))
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
