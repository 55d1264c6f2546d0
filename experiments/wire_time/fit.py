"""Latency and bandwidth of a collective, fitted to measured times."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from graphpasses.scale import Speeds, Transfer, wire_seconds

__all__ = ["fit"]


def fit(measured: Iterable[tuple[Transfer, float]], num_senders: int) -> Speeds:
    """Fits launch latency, hop latency and bandwidth of a ring to measured times.

    The model is linear in the three (the bandwidth's inverse is the third), so it gives their factors itself: the
    time with one of them 1 and the others 0. Least squares of relative errors, since sizes differ by thousands; what
    comes out below zero is left out and the rest fitted again.

    Args:
        measured: transfers of one kind of collective and their seconds.
        num_senders: see :class:`Speeds`.

    Returns:
        One node's speeds.

    Example:
        >>> truth = Speeds(ranks=(2,), launch_latency=5, intra_latency=2, intra_bandwidth=10, gpus_per_node=64)
        >>> cases = [Transfer("all_gather", size, num, 1) for size in (10**3, 10**6, 10**7) for num in (2, 4)]
        >>> found = fit([(case, wire_seconds(case, truth, "ring")) for case in cases], 0)
        >>> round(found.intra_latency, 3), round(found.intra_bandwidth, 3)
        (2.0, 10.0)
    """
    rows, kept = [], [0, 1, 2]
    for transfer, seconds in measured:
        factors = (wire_seconds(transfer, _speeds(each, num_senders), "ring") for each in _UNITS)
        rows.append([factor / seconds for factor in factors])
    while True:
        matrix = torch.tensor(rows, dtype=torch.float64)[:, kept]
        found = torch.linalg.lstsq(matrix, torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten()
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    values = [0.0, 0.0, 0.0]
    for index, value in zip(kept, found.tolist(), strict=True):
        values[index] = value
    return _speeds((values[0], values[1], values[2]), num_senders)


_UNITS = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def _speeds(values: tuple[float, float, float], num_senders: int) -> Speeds:
    """Returns one node's speeds: microseconds, microseconds, seconds per GB."""
    launch, hop, per_gigabyte = values
    return Speeds(
        ranks=(2,),
        gpus_per_node=64,
        num_senders=num_senders,
        launch_latency=launch,
        intra_latency=hop,
        intra_bandwidth=1 / per_gigabyte if per_gigabyte else float("inf"),
    )
