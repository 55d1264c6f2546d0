"""What a log with ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING`` says of NCCL's choices."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TypeVar

from graphpasses.errors import TopologyError

_FUNCTIONS = {"Reduce": "reduce", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce"}
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_BY_NAME = {name.replace("_", ""): name for name in ALGORITHMS}
PROTOCOLS = ("ll", "ll128", "simple")
# "  Algorithm   |                 Tree   …   |", then "    AllReduce |    6.8/  20.0 |    14.0/ …".
_HEAD = re.compile(r"Algorithm +\|(.*)\|")
_ROW = re.compile(r"\b(Reduce|ReduceScatter|AllReduce) \|((?: *[\d.]+/ *[\d.]+ \|)+)")
_CELL = re.compile(r"([\d.]+)/ *([\d.]+) \|")
# NCCL 2.23 prints numbers and bytes of the larger buffer, later ones names and bytes of one rank's part.
_PLUGIN = re.compile(r"TUNER/Plugin: Using (?:tuner plugin )?(?!internal)(\S+)")
_CHOICE = re.compile(
    r"\b(Reduce|ReduceScatter|AllReduce): (\d+) Bytes -> Algo (\w+) proto (\w+)"
    r"( time| channel\{Lo\.\.Hi\}(?:=\{(\d+)\.\.(\d+)\})?)"
)


@dataclass(frozen=True)
class TuningLog:
    """Choices and costs of one communicator; see :func:`parse_tuning_log`."""

    # Collective, algorithm, protocol, latency (µs) and bandwidth (GB/s; 0: not to be taken), rounded to a
    # tenth by NCCL.
    table: tuple[tuple[str, str, str, float, float], ...]
    # Collective, bytes, whether they are those of the larger buffer, algorithm and protocol.
    choices: tuple[tuple[str, int, bool, str, str], ...]
    # Collective, bytes, first and last channel of what ran; 2.23 does not print them.
    channels: tuple[tuple[str, int, int, int], ...] = ()
    plugin: str = ""  # a tuner plugin, which can choose otherwise than NCCL; "" if there is none

    def costs(self, collective: str) -> dict[tuple[str, str], tuple[float, float]]:
        """Returns latency and bandwidth by algorithm and protocol; {} if the log has no table."""
        return {(each[1], each[2]): each[3:] for each in self.table if each[0] == collective}

    def choice(self, collective: str, num_bytes: int, num_bytes_in_all: int) -> tuple[str, str] | None:
        """Returns the algorithm and protocol that were taken for a size; None if there was none of it.

        ``num_bytes`` are those of one rank's part, ``num_bytes_in_all`` of the larger of input and output.
        """
        for name, size, is_larger, algorithm, protocol in self.choices:
            if name == collective and size == (num_bytes_in_all if is_larger else num_bytes):
                return algorithm, protocol
        return None

    def contradicts(self, num_channels: int, collective: str, num_bytes: int) -> str:
        """Says why a size may not have had the first ``num_channels`` channels; "" if nothing speaks against it."""
        seen = {each[2:] for each in self.channels if each[:2] == (collective, num_bytes)}
        if seen - {(0, num_channels - 1)}:
            return f"NCCL took other channels than the {num_channels} that the model has"
        return f"the tuner plugin {self.plugin} may choose other channels" if self.plugin and not seen else ""


Key = TypeVar("Key")
Value = TypeVar("Value")


def learn(known: dict[Key, Value], key: Key, value: Value, what: str, of_one: str = "communicator") -> None:
    """Adds what a line of a log says; raises if another line has said otherwise."""
    if (before := known.setdefault(key, value)) != value:
        raise TopologyError(f"the log has two {what}, {before} and {value}; keep the lines of one {of_one}")


def parse_tuning_log(text: str) -> TuningLog | None:
    """Reads NCCL's table of costs, and what it took for which size; None if there is neither, and no tuner plugin.

    Lines do not name the reduction, so a SUM and an AVG of one size that take different choices contradict each
    other. Source: NCCL ``src/graph/tuning.cc`` (``ncclTopoTuneModel``) and ``src/enqueue.cc`` (``topoGetAlgoInfo`` of
    2.23, ``scheduleCollTasksToPlan`` of 2.24 and later).
    """
    table: dict[tuple[str, str, str], tuple[float, float]] = {}
    choices: dict[tuple[str, int, bool], tuple[str, str]] = {}
    channels: dict[tuple[str, int, int, int], None] = {}
    algorithms: list[str] = []
    for line in text.splitlines():
        if head := _HEAD.search(line):
            names = re.findall(r"\w+", head[1].lower())
            algorithms = [_BY_NAME.get(name, name) for name in names]
        elif row := _ROW.search(line):
            cells = zip(itertools.product(algorithms, PROTOCOLS), _CELL.findall(row[2]), strict=False)
            for (algorithm, protocol), (latency, bandwidth) in cells:
                key, value = (_FUNCTIONS[row[1]], algorithm, protocol), (float(latency), float(bandwidth))
                learn(table, key, value, f"costs of {', '.join(key)}")
        elif found := _CHOICE.search(line):
            function, size, algorithm, protocol, rest, low, high = found.groups()
            if low is not None:
                channels[_FUNCTIONS[function], int(size), int(low), int(high)] = None
            if rest == " time":
                algorithm, protocol = ALGORITHMS[int(algorithm)], PROTOCOLS[int(protocol)]
            taken, key_of = (algorithm.lower(), protocol.lower()), (_FUNCTIONS[function], int(size), rest == " time")
            what = f"choices for {_FUNCTIONS[function]} of {size} bytes"
            learn(choices, key_of, taken, what, "communicator and one reduction")
    plugin = _PLUGIN.search(text)
    if not table and not choices and plugin is None:
        return None
    return TuningLog(
        tuple((*key, *value) for key, value in table.items()),
        tuple((*key, *value) for key, value in choices.items()),
        tuple(channels),
        "" if plugin is None else plugin[1],
    )
