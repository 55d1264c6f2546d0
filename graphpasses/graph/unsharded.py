"""Parameters that FSDP2 has unsharded between the calls of a captured step, as eager leaves them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from torch import nn

from graphpasses._torch.fsdp2 import fsdp_groups, reshard, set_aside, take_back, unshard
from graphpasses.errors import CaptureError
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.state.snapshot import check_unsharded


def check_written_groups(written: Mapping[int, str], unsharded: Collection[int]) -> None:
    """Raises if one of the groups that a step writes, by index the FQN of a parameter, is left unsharded by eager."""
    for index in sorted(written.keys() & unsharded):
        raise CaptureError(
            f"loss_fn writes parameter {written[index]!r}, of a fully_sharded module that it leaves unsharded, as a "
            "forward without a backward does, or set_reshard_after_backward(False): eager FSDP2 reads that memory "
            "from then on, not the shards, until it reshards. Let the step do so, by fully_shard(..., "
            "reshard_after_forward=True), by reshard() at the end of loss_fn, or by set_reshard_after_backward(True)"
            "; or write it after the step, and call its reshard() before"
        )


class Unsharded:
    """The groups of a model, by their indexes: which are unsharded, and which a call leaves so."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._aside: frozenset[int] = frozenset()

    @cached_property
    def groups(self) -> tuple[Any, ...]:
        """All groups, sharded or not."""
        return fsdp_groups(self._model)

    @property
    def left(self) -> frozenset[int]:
        """Those that are unsharded now."""
        return frozenset(index for index, group in enumerate(self.groups) if group.is_unsharded)

    def kept(self, written: Mapping[int, str]) -> frozenset[int]:
        """Returns those that backward leaves unsharded; raises if a step has ``written`` one."""
        kept = frozenset(index for index, group in enumerate(self.groups) if not group.reshard_after_backward)
        check_written_groups(written, kept)
        return kept

    def shard(self, staying: Collection[int] = ()) -> None:
        """Shards all groups, on all ranks alike; if one is out of date on one rank, all raise.

        Those ``staying`` keep their memory, so that they need not be gathered again.
        """
        if not all(group.is_sharded for group in self.groups):
            elsewhere = CaptureError(
                "on another rank a parameter changed while it was unsharded; its message says which"
            )
            with RankConsensus.of_model(self._model).raised_together(elsewhere, communicates=False):
                check_unsharded(self.groups)
        self._aside = self.left & frozenset(staying)
        set_aside(self.groups[index] for index in self._aside)
        reshard(self.groups)

    def unshard(self, indexes: Collection[int]) -> None:
        """Leaves groups unsharded, and those that stayed."""
        take_back(self.groups[index] for index in self._aside)
        unshard(self.groups[index] for index in {*indexes} - self._aside)
