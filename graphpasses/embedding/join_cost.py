"""Which lookups are worth joining: one lookup has one batch size, so those of smaller batches are padded.

The constants were measured by ``python -m experiments.torchrec_bench.join_cost``: CPU time of forward and backward of
compiled lookups, joined against apart, in turns; FBGEMM 1.8.0, one thread, float32, SGD and row-wise Adagrad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from graphpasses._torch.symbols import example_size
from graphpasses.fbgemm.lookups import LookupCall

# In microseconds. Joining saves up to 20 of them per lookup.
_LOOKUP = 20.0
# Padded columns are written in forward and are zeros in backward; padded bags are empty, but each is asked.
_COLUMN = 0.5e-3
_BAG = 5.5e-3


@dataclass(frozen=True)
class BatchOfBags:
    """What a lookup looks up, and how much it returns."""

    batch_size: int | None  # samples; None if nothing is known of them
    num_features: int  # bags per sample
    num_columns: int  # columns that it returns per sample; 0 without pooling, which returns a row per id

    @classmethod
    def of(cls, call: LookupCall) -> BatchOfBags:
        """Returns what a call looked up while it was traced; a batch of all ranks counts this rank's for each."""
        num_offsets, num_others = example_size(call.arguments["offsets"].meta["val"].size(0))
        batch_size = (num_offsets - 1) // call.num_features * (1 + num_others)
        return cls(
            batch_size=None if num_others and batch_size == 0 else batch_size,
            num_features=call.num_features,
            num_columns=call.arguments["total_D"] if call.is_pooled else 0,
        )

    @property
    def cost_of_sample(self) -> float:
        """Microseconds that one padded sample takes."""
        return _BAG * self.num_features + _COLUMN * self.num_columns


def padding_cost(lookups: Sequence[BatchOfBags], batch_size: int) -> float:
    """Returns the microseconds per step that it takes to pad lookups, of known batch sizes, to ``batch_size``."""
    return sum((batch_size - (lookup.batch_size or 0)) * lookup.cost_of_sample for lookup in lookups)


def plan_joins(lookups: Sequence[BatchOfBags]) -> list[tuple[int, ...]]:
    """Returns which lookups become one, by position, larger batches first; no other partition costs less.

    Lookups of unknown batch sizes are taken to have the same.
    """
    unknown = tuple(index for index, lookup in enumerate(lookups) if lookup.batch_size is None)
    sizes = {index: lookup.batch_size for index, lookup in enumerate(lookups) if lookup.batch_size is not None}
    order = sorted(sizes, key=lambda index: -sizes[index])
    costs = [lookups[index].cost_of_sample for index in order]
    weights = [0.0, *accumulate(costs)]
    weighted = [0.0, *accumulate(cost * sizes[index] for cost, index in zip(costs, order, strict=True))]

    def padding(start: int, end: int) -> float:
        return sizes[order[start]] * (weights[end] - weights[start]) - (weighted[end] - weighted[start])

    # The least cost of the first lookups, and where the last of their joined lookups begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(order) + 1):
        best.append(min((best[start][0] + _LOOKUP + padding(start, end), start) for start in range(end)))
    groups, end = [], len(order)
    while end:
        start = best[end][1]
        groups.append(tuple(sorted(order[start:end])))
        end = start
    return [*reversed(groups), *([unknown] if unknown else [])]
