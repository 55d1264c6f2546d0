"""The constants of NCCL's cost model, and in which version each was changed.

Source: NCCL ``src/graph/tuning.cc`` of the releases 2.23.4, 2.24.3, 2.25.1, 2.26.2, 2.27.3, 2.27.7, 2.28.3, 2.28.9,
2.29.2, 2.29.7, 2.30.3 and 2.30.7: ``baseLat``, ``hwLat``, ``llMaxBws``, ``perChMax…Bws``, ``treeCorrectionFactor``;
from 2.28 on fields of ``ncclTunerConstantsDefaults``. Latencies are in microseconds, bandwidths in GB/s.
"""

from __future__ import annotations

from graphpasses.simulate.hardware import Hardware

# In the order in which NCCL compares them; CollNet, which stands after ring there, is not modelled.
ALGORITHMS = ("tree", "ring", "nvls", "nvls_tree", "pat")

# By protocol. PAT's was a term of its latency's formula before 2.28.
BASE_LATENCY = {
    "tree": (6.8, 14.0, 8.4),
    "ring": (6.6, 14.0, 8.4),
    "nvls": (0.0, 0.0, 0.0),
    "nvls_tree": (0.0, 0.0, 0.0),
    "pat": (8.0, 8.0, 8.0),
}

# By link, algorithm and protocol. The network's of nvls_tree was 14 up to 2.28.8: see choice.py.
LINK_LATENCY: dict[str, dict[str, tuple[float, float, float]]] = {
    "nvlink": {
        "tree": (0.6, 1.25, 4.0),
        "ring": (0.6, 1.9, 3.4),
        "nvls": (0.0, 0.0, 25.0),
        "nvls_tree": (0.0, 0.0, 25.0),
        "pat": (0.0, 0.0, 4.0),
    },
    "pci": {
        "tree": (1.0, 1.9, 4.0),
        "ring": (1.0, 2.5, 5.7),
        "nvls": (0.0, 0.0, 0.0),
        "nvls_tree": (0.0, 0.0, 0.0),
        "pat": (0.0, 0.0, 4.0),
    },
    "net": {
        "tree": (5.0, 8.5, 14.0),
        "ring": (2.7, 4.0, 14.0),
        "nvls": (0.0, 0.0, 18.0),
        "nvls_tree": (0.0, 0.0, 20.9),
        "pat": (0.0, 0.0, 14.0),
    },
}

# What a tree all-reduce has of its bandwidth, by the buffer's size: 64 B, 128 B, … 256 MiB (and 512 MiB from 2.29).
TREE_CORRECTION = {
    "ll": (
        *(1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5),
        *(0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    ),
    "ll128": (
        *(1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6),
        *(0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    ),
    "simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
    ),
}

# Rows: Volta, Ampere, Hopper, Blackwell. Columns: 1, 2, and more nodes.
_LL_MAX = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_PER_CHANNEL = {
    "ring_ll128": ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 36.7), (40.0, 40.0, 40.0)),
    "tree_ll128": ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0)),
    "tree": ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0)),
    "nvls_tree": ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0)),
}
# Blackwell's row up to the version, which is not included; the first that fits.
_OLDER_BLACKWELL: dict[str, tuple[tuple[tuple[int, ...], tuple[float, float, float]], ...]] = {
    "ring_ll128": (((2, 28, 7), (73.4, 73.4, 73.4)), ((2, 29), (73.4, 34.6, 73.4)), ((2, 29, 7), (34.5, 34.6, 34.5))),
    "tree_ll128": (((2, 28), (73.4, 73.4, 58.0)),),
    "tree": (((2, 28), (77.4, 82.8, 72.0)),),
    "nvls_tree": (((2, 28, 9), (0.0, 96.0, 43.1)), ((2, 30), (0.0, 96.0, 43.8))),
}
# Which part of a link's bandwidth NVLS reaches, from 2.28 on.
NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)


def generation(hardware: Hardware) -> int:
    """Returns the row of a GPU in the tables: 0 Volta, 1 Ampere, 2 Hopper, 3 Blackwell (Hopper before 2.25)."""
    capability = hardware.get("compute_capability")
    if capability >= 100 and hardware.at_least(2, 25):
        return 3
    return 2 if capability >= 90 else 1 if capability >= 80 else 0


def ll_max_bandwidth(hardware: Hardware, num_nodes: int) -> float:
    """Returns the bus bandwidth that LL cannot exceed: by GPU on one node, by CPU on several."""
    row = generation(hardware) if num_nodes == 1 else int(hardware.get("cpu") == "amd")
    return _LL_MAX[row][min(num_nodes, 3) - 1]


def per_channel_max(hardware: Hardware, name: str, num_nodes: int) -> float:
    """Returns the bandwidth that a channel cannot exceed, by a name of the table."""
    row = _PER_CHANNEL[name][generation(hardware)]
    if generation(hardware) == 3:
        older = (values for until, values in _OLDER_BLACKWELL[name] if not hardware.at_least(*until))
        row = next(older, row)
    return row[min(num_nodes, 3) - 1]
