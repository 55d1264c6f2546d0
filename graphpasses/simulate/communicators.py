"""The communicators of a log: which ranks each has, and which lines are its."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from graphpasses.errors import TopologyError

_LINE = re.compile(r"([^\s:\[\]]+):(\d+):(\d+) \[-?\d+\] NCCL INFO (.*)")  # host, process, thread
_INIT = re.compile(
    r"comm (0x[0-9a-f]+) rank (\d+) nranks (\d+) .*?"
    r"(?:parent (0x[0-9a-f]+) (?:(?:childCount|splitCount) (\d+) )?color (-?\d+)|commId (0x[0-9a-f]+)).*"
    r"- Init (START|COMPLETE)"
)
_COLLECTIVE = re.compile(r"\w+: opCount \S+ .*\bcomm (0x[0-9a-f]+) \[nranks=\d+\]")
_CHOICE = re.compile(r"\w+: \d+ Bytes -> Algo ")

_Process = tuple[str, str]  # host and number


@dataclass
class _Communicator:
    """One that several processes have, by their own addresses."""

    num_ranks: int
    members: dict[int, _Process] = field(default_factory=dict)  # by rank of the communicator
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """Ranks that have a communicator of their own."""

    ranks: tuple[int, ...]  # of the run, in the communicator's order
    hosts: tuple[str, ...]  # of each of them
    text: str  # the communicator's lines; of several communicators, if the same ranks have them


def groups_of_log(text: str) -> tuple[Group, ...]:
    """Returns the groups of ranks of a log; () if it does not say whose its lines are, or all are one group's.

    A communicator's are the lines between the start and the end of its initialization, in the same thread, and what
    was taken for a collective of it, where lines of ``NCCL_DEBUG_SUBSYS=COLL`` say of which; without them, where the
    process is in one group alone. Communicators of which ranks did not log are left out. Source: NCCL ``src/init.cc``
    (``ncclCommInitRankFunc``), ``src/enqueue.cc`` (``ncclEnqueueCheck``).
    """
    communicators, choices = _read(text)
    complete = [each for each in communicators if len(each.members) == each.num_ranks]
    found: dict[tuple[_Process, ...], list[str]] = defaultdict(list)
    for each in complete:
        found[tuple(each.members[rank] for rank in range(each.num_ranks))] += each.lines
    if len(found) < 2:
        return ()
    rank_of = _ranks_of(complete, {process for each in communicators for process in each.members.values()})
    for process, lines in choices.items():
        if len(its := [group for group in found if process in group]) == 1:
            found[its[0]] += lines
    return tuple(
        Group(tuple(rank_of[each] for each in group), tuple(host for host, _ in group), "\n".join(lines))
        for group, lines in found.items()
    )


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
