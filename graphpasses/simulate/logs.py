"""Reading the rings and trees of a real run from its ``NCCL_DEBUG=INFO`` log."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from graphpasses.errors import TopologyError
from graphpasses.simulate.hardware import UNKNOWN_HARDWARE, Hardware
from graphpasses.simulate.rings import Ring, Topology, Tree, fills_nodes
from graphpasses.simulate.tuning_log import learn, parse_tuning_log

# "Channel 00/16 :    0   7   6 ..." but not "Channel 00/0 : 0[0] -> 1[1] via P2P".
_CHANNEL_LINE = re.compile(r"Channel (\d+)/(\d+) *:((?: +\d+)+)[ \r]*$", re.MULTILINE)

# "Trees [0] 1/8/-1->0->-1 [1] …" of one rank: per channel its children, itself, its parent.
_TREES_LINE = re.compile(r"Trees((?: \[\d+\] -?\d+/-?\d+/-?\d+->\d+->-?\d+)+)")
_TREE = re.compile(r"\[(\d+)\] (-?\d+)/(-?\d+)/(-?\d+)->(\d+)->(-?\d+)")
_MAX_LINE = 1023  # characters

_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_SETTING = re.compile(r"(NCCL_\w+) set by environment to ([^\s.]+)")
_NOT_MODELLED = re.compile(r"NCCL_(LL_|LL128_)?BUFFSIZE|NCCL_(LL128_)?NTHREADS|NCCL_THREAD_THRESHOLDS")

# What says whose a line is.
_LINE = re.compile(r"([^\s:\[\]]+):(\d+):(\d+) \[-?\d+\] NCCL INFO (.*)")  # host, process, thread
_INIT = re.compile(
    r"comm (0x[0-9a-f]+) rank (\d+) nranks (\d+) .*?"
    r"(?:parent (0x[0-9a-f]+) (?:(?:childCount|splitCount) (\d+) )?color (-?\d+)|commId (0x[0-9a-f]+)).*"
    r"- Init (START|COMPLETE)"
)
_COLLECTIVE = re.compile(r"\w+: opCount \S+ .*\bcomm (0x[0-9a-f]+) \[nranks=\d+\]")
_CHOICE = re.compile(r"\w+: \d+ Bytes -> Algo ")

_Process = tuple[str, str]  # host and number


def parse_nccl_log(text: str) -> tuple[Ring, ...]:
    """Reads the rings of one communicator from a log, in channel order.

    Source: NCCL ``src/graph/rings.cc`` (``ncclBuildRings`` prints the line on rank 0).
    """
    found: dict[int, Ring] = {}
    totals = set()
    for channel, total, ranks in _CHANNEL_LINE.findall(text):
        learn(found, int(channel), tuple(map(int, ranks.split())), f"rings of channel {channel}")
        totals.add(int(total))
    if not found:
        raise TopologyError(
            'no line "Channel cc/NN : 0 1 2 ..." in the log; it is printed by rank 0 under NCCL_DEBUG=INFO'
        )
    if len(totals) > 1 or sorted(found) != list(range(max(totals))):
        raise TopologyError(
            f"the log names channels {sorted(found)} out of {sorted(totals)}; keep all lines of one communicator"
        )
    for channel, ring in found.items():
        if sorted(ring) != list(range(len(found[0]))):
            raise TopologyError(
                f"channel {channel:02d} of the log is {list(ring)}, "
                f"not a permutation of the ranks 0 to {len(found[0]) - 1}"
            )
    return tuple(found[channel] for channel in sorted(found))


def parse_trees(text: str, num_ranks: int, num_channels: int, *, is_one_node: bool = False) -> tuple[Tree, ...]:
    """Reads the tree of every channel of one communicator from a log of all ranks; () if not all of them are there.

    NCCL ends a line after some 50 channels. Of one node the second half of the channels has the trees
    of the first. Source: NCCL ``src/init.cc`` (``initTransportsRank``), ``src/graph/connect.cc`` (``connectTrees``).
    """
    found: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
    for line in filter(None, map(_TREES_LINE.search, text.splitlines())):
        entries = _TREE.findall(line[1])
        if len(line.string) >= _MAX_LINE:
            del entries[-1]  # of whose last number only the beginning may be there
        for entry in entries:
            channel, *below, rank, parent = (int(number) for number in entry)
            own = tuple(child for child in below if child >= 0), parent
            learn(found, (channel, rank), own, f"trees of rank {rank} on channel {channel}")
    half = num_channels // 2
    doubled = {(channel + half, rank): own for (channel, rank), own in found.items() if channel < half}
    if is_one_node and num_channels == 2 * half and all(found.get(key, own) == own for key, own in doubled.items()):
        found |= doubled
    if found.keys() != {(channel, rank) for channel in range(num_channels) for rank in range(num_ranks)}:
        return ()
    for (channel, rank), (children, _) in found.items():
        for child in children:
            if found.get((channel, child), ((), None))[1] != rank:
                raise TopologyError(f"rank {child} is not below rank {rank} on both lines of channel {channel}")
    return tuple(tuple(found[channel, rank][0] for rank in range(num_ranks)) for channel in range(num_channels))


def topology_from_log(text: str, *, gpus_per_node: int, **options: Any) -> Topology:
    """Takes rings, trees, the number of channels and, if it has them, NCCL's choices from a log.

    Args:
        text: output of a run with ``NCCL_DEBUG=INFO``, of one communicator or, of all ranks, of several.
            NCCL's version, ``NCCL_ALGO`` and ``NCCL_PROTO`` are its, too.
        gpus_per_node: ranks on each node.
        options: other fields of :class:`Topology`, e.g. ``protocol="ll128"``.

    Returns:
        A topology of mode ``"explicit"``. Trees are taken if all ranks printed theirs; lines of
        ``NCCL_DEBUG_SUBSYS=TUNING`` become ``hardware.log``. Groups of ranks that have a communicator of their own
        become ``groups``; which choice is whose, lines of ``COLL`` say.

    Raises:
        TopologyError: the log holds no rings, or rings that contradict each other, two versions of NCCL or one that
            is not modelled, settings that change chunks, or several communicators and none of all ranks.

    Example:
        >>> topology_from_log("Channel 00/01 : 0 2 1 3", gpus_per_node=2).explicit_rings
        ((0, 2, 1, 3),)
    """
    hardware = options.pop("hardware", UNKNOWN_HARDWARE)
    settings = dict(_SETTING.findall(text))
    if unknown := sorted(filter(_NOT_MODELLED.fullmatch, settings)):
        raise TopologyError(f"the log's run has {unknown[0]} set, which changes chunks and is not modelled")
    versions = sorted(set(_VERSION.findall(text)))
    if len(versions) > 1:
        raise TopologyError(f"the log is of several versions of NCCL, {' and '.join(versions)}; give one run's")
    hardware = replace(
        hardware,
        nccl_version=versions[0] if versions else hardware.nccl_version,
        algorithms=settings.get("NCCL_ALGO", hardware.algorithms),
        protocols=settings.get("NCCL_PROTO", hardware.protocols),
    )
    groups: list[tuple[Ring, Topology]] = []
    (_, _, text), *others = sorted(_groups_of_log(text), key=lambda group: -len(group[0])) or [((), (), text)]
    for ranks, hosts, lines in others:
        num_local = len(hosts) // len({*hosts})
        num_local = num_local if fills_nodes(hosts, num_local) else 1
        try:
            groups.append((ranks, _topology(lines, num_local, hardware, options)))
        except TopologyError:  # of several communicators that differ, or without rings: it is not known
            continue
    return replace(_topology(text, gpus_per_node, hardware, options), groups=tuple(groups))


def _topology(text: str, gpus_per_node: int, hardware: Hardware, options: dict[str, Any]) -> Topology:
    found = parse_nccl_log(text)
    if (log := parse_tuning_log(text)) is not None:
        hardware = replace(hardware, log=log)
    return Topology(
        num_ranks=len(found[0]),
        gpus_per_node=gpus_per_node,
        mode="explicit",
        explicit_rings=found,
        num_channels=len(found),
        explicit_trees=parse_trees(text, len(found[0]), len(found), is_one_node=len(found[0]) == gpus_per_node),
        hardware=hardware,
        **options,
    )


@dataclass
class _Communicator:
    """One that several processes have, by their own addresses."""

    num_ranks: int
    members: dict[int, _Process] = field(default_factory=dict)  # by rank of the communicator
    lines: list[str] = field(default_factory=list)


def _groups_of_log(text: str) -> list[tuple[Ring, tuple[str, ...], str]]:
    """Returns the ranks of each communicator of a log, in its order, their hosts, and its lines.

    None if the log does not say whose its lines are, or all are one group's. A communicator's are the lines between
    the start and the end of its initialization, in the same thread, and what was taken for a collective of it, where
    lines of ``NCCL_DEBUG_SUBSYS=COLL`` say of which; without them, where the process is in one group alone. Those of
    which ranks did not log are left out. Source: NCCL ``src/init.cc`` (``ncclCommInitRankFunc``),
    ``src/enqueue.cc`` (``ncclEnqueueCheck``).
    """
    communicators, choices = _read(text)
    complete = [each for each in communicators if len(each.members) == each.num_ranks]
    found: dict[tuple[_Process, ...], list[str]] = defaultdict(list)
    for each in complete:
        found[tuple(each.members[rank] for rank in range(each.num_ranks))] += each.lines
    if len(found) < 2:
        return []
    rank_of = _ranks_of(complete, {process for each in communicators for process in each.members.values()})
    for process, lines in choices.items():
        if len(its := [group for group in found if process in group]) == 1:
            found[its[0]] += lines
    return [
        (tuple(rank_of[each] for each in group), tuple(host for host, _ in group), "\n".join(lines))
        for group, lines in found.items()
    ]


def _ranks_of(communicators: list[_Communicator], processes: set[_Process]) -> dict[_Process, int]:
    """Returns the rank of each process in the first communicator that all have."""
    for each in communicators:
        if {*each.members.values()} == processes:
            return {process: rank for rank, process in each.members.items()}
    raise TopologyError(
        "the log has several communicators, none of them of all processes, so that nothing says which process is "
        "which rank; call torch.distributed.barrier() before training"
    )


def _read(text: str) -> tuple[list[_Communicator], dict[_Process, list[str]]]:
    """Returns the communicators of a log, and, by process, what was taken for no known one."""
    communicators: dict[object, _Communicator] = {}
    choices: dict[_Process, list[str]] = defaultdict(list)
    here: dict[tuple[_Process, str], tuple[object, _Communicator]] = {}  # by address
    starting: dict[tuple[_Process, str], _Communicator] = {}  # by thread
    called: dict[tuple[_Process, str], _Communicator | None] = {}  # likewise
    for line in filter(None, map(_LINE.search, text.splitlines())):
        host, pid, number, said = line.groups()
        process: _Process = (host, pid)
        thread = process, number
        if init := _INIT.search(said):
            address, rank, num_ranks, parent, count, color, key, what = init.groups()
            if what == "COMPLETE":
                starting.pop(thread, None)
                continue
            if parent is not None:  # what is split off has no name of its own
                key = here.get((process, parent), (parent, None))[0], count, color
            begun = starting[thread] = communicators.setdefault(key, _Communicator(int(num_ranks)))
            begun.members[int(rank)] = process
            here[process, address] = key, begun
        elif call := _COLLECTIVE.match(said):
            called[thread] = here.get((process, call[1]), (None, None))[1]
        elif _CHOICE.match(said):
            owner = called.get(thread)
            (choices[process] if owner is None else owner.lines).append(said)
        elif thread in starting:
            starting[thread].lines.append(said)
    return [*communicators.values()], choices
