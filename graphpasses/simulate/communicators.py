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
    reader = _Reader()
    for line in text.splitlines():
        reader.read(line)
    complete = [each for each in reader.communicators.values() if len(each.members) == each.num_ranks]
    members = {tuple(each.members[rank] for rank in range(each.num_ranks)) for each in complete}
    if len(members) < 2:
        return ()
    rank_of = _ranks_of(complete, reader.processes)
    found: dict[tuple[_Process, ...], list[str]] = defaultdict(list)
    for each in complete:
        found[tuple(each.members[rank] for rank in range(each.num_ranks))] += each.lines
    for process, lines in reader.choices.items():
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


class _Reader:
    """What the lines of a log say, one after the other."""

    def __init__(self) -> None:
        self.communicators: dict[object, _Communicator] = {}
        self.processes: set[_Process] = set()
        self.choices: defaultdict[_Process, list[str]] = defaultdict(list)  # of no known communicator
        self._here: dict[tuple[_Process, str], tuple[object, _Communicator]] = {}  # by address
        self._starting: dict[tuple[_Process, str], _Communicator] = {}  # by thread
        self._called: dict[tuple[_Process, str], _Communicator | None] = {}

    def read(self, line: str) -> None:
        if (found := _LINE.search(line)) is None:
            return
        host, pid, number, text = found.groups()
        process: _Process = (host, pid)
        thread = process, number
        if init := _INIT.search(text):
            if init[8] == "COMPLETE":
                self._starting.pop(thread, None)
            else:
                self._starting[thread] = self._begin(process, init)
        elif call := _COLLECTIVE.match(text):
            self._called[thread] = self._here.get((process, call[1]), (None, None))[1]
        elif _CHOICE.match(text):
            owner = self._called.get(thread)
            (self.choices[process] if owner is None else owner.lines).append(text)
        elif thread in self._starting:
            self._starting[thread].lines.append(text)

    def _begin(self, process: _Process, init: re.Match[str]) -> _Communicator:
        address, rank, num_ranks, parent, count, color, name, _ = init.groups()
        self.processes.add(process)
        key: object = name
        if parent is not None:  # what is split off has no name of its own
            key = self._here.get((process, parent), (parent, None))[0], count, color
        found = self.communicators.setdefault(key, _Communicator(int(num_ranks)))
        found.members[int(rank)] = process
        self._here[process, address] = key, found
        return found
