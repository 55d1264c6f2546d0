"""How ranks agree while they compile.

Every rank launches the same collectives in the same order. A pass that changes them must therefore decide the same on
every rank. But a rank's graph shows only what this rank needs: one without tables does not read the ids that it
receives. So each rank reports its facts, and every rank combines all reports by the same pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from graphpasses._torch.fake_mode import outside_tracing
from graphpasses._torch.group_ranks import gathered, group_ranks, group_store, named_group
from graphpasses.errors import AgreementError
from graphpasses.graph import ALL_TO_ALL, WAIT, TrainGraph, argument
from graphpasses.graph.nodes import collective_group

F = TypeVar("F")  # the facts of one rank
A = TypeVar("A")  # what the ranks agree on


@dataclass(frozen=True)
class Question(Generic[F, A]):
    """What a pass asks all ranks before it changes their collectives.

    ``combine`` gets the facts of each rank, in group order, and nothing else. ``contradiction`` gets what was agreed
    and this rank's facts; it says what is wrong, after "rank 3", or ``""``. They may differ if a rank compiles again
    while the others do not: it must do what they agreed on, or refuse.
    """

    pass_name: str
    topic: str
    combine: Callable[[list[F]], A]
    contradiction: Callable[[A, F], str]


class Told(NamedTuple):
    """What ranks told each other of the launches of a graph."""

    launches: tuple[str, ...]  # names of the all-to-alls, on this rank
    by_rank: list[Any]  # the facts of each rank, in group order


class CollectiveSequence:
    """The collectives of a graph in launch order; every rank has the same."""

    def __init__(self, graph: TrainGraph) -> None:
        self._graph = graph
        self.nodes = [node for node in graph.graph.nodes if collective_group(node) is not None]
        self.groups = list(dict.fromkeys(map(collective_group, self.nodes)))
        self._lines = [_describe(node, self.groups.index(collective_group(node))) for node in self.nodes]

    @property
    def all_to_alls(self) -> list[fx.Node]:
        """The all-to-alls that a pass can change: each is waited for once."""
        return [node for node in self.nodes if node.target == ALL_TO_ALL and _is_waited_for_once(node)]

    def agree(self, question: Question[F, A], facts: F, groups: Sequence[object] | None = None) -> A:
        """Returns what all ranks agree on that share a group, or groups that share a rank, in one order of calls.

        They exchange facts, which can be pickled, group after group, as along the axes of a mesh, so what one rank
        knows reaches all; or in ``groups`` alone.
        """
        topic = f"{question.topic} of the {self._graph.stage.value} graph, for {question.pass_name}"
        remembered, place = self._graph.remembered, self._graph.place
        agreed: Any = facts
        for name in self.groups if groups is None else groups:
            group = named_group(str(name))
            signature = [topic, *self._lines]
            facts_by_rank = exchange(signature, agreed, group=group, remembered=remembered, place=place)
            launches = tuple(node.name for node in self.all_to_alls)
            self._graph.told[question.pass_name, str(name)] = Told(launches, facts_by_rank)
            agreed = question.combine(facts_by_rank)
        if wrong := question.contradiction(agreed, facts):
            raise AgreementError(f"rank {dist.get_rank()} {wrong}. Disable {question.pass_name!r} for this model")
        answer: A = agreed
        return answer


def _is_waited_for_once(launch: fx.Node) -> bool:
    return [user.target for user in launch.users] == [WAIT]


def _describe(node: fx.Node, group: int) -> str:
    value = argument(node).meta["val"] if isinstance(node.args[0], fx.Node) else None
    tensor = f" of {value.dtype} on {value.device.type}" if isinstance(value, torch.Tensor) else ""
    waits = "" if _is_waited_for_once(node) else " (not waited for once)"
    return f"{node.target}{tensor} in process group {group}{waits}"


# ---- classes: which of some things are the same, as each rank sees it ------------------------------------


def common_classes(classes: list[list[int]]) -> list[int]:
    """Returns for each thing the index of the first that is of its class on every rank; -1 if it is of none on some.

    ``classes`` has, per rank, a number for each thing: things of one class have one number, and -1 is of no class.
    """
    first: dict[tuple[int, ...], int] = {}
    by_thing = enumerate(zip(*classes, strict=True))
    return [-1 if -1 in seen else first.setdefault(seen, index) for index, seen in by_thing]


def breaks_class(agreed: Sequence[int], own: Sequence[int]) -> bool:
    """Whether this rank sees a difference within a class on which all ranks agreed."""
    return any(first >= 0 and (own[index] < 0 or own[index] != own[first]) for index, first in enumerate(agreed))


# ---- the exchange ---------------------------------------------------------------------------------------


def is_alone(group: dist.ProcessGroup) -> bool:
    """Whether no other process belongs to ``group``: it has one rank, or is a fake process group."""
    return group.size() == 1 or dist.get_backend(group) == "fake"


def exchange(
    signature: Sequence[str],
    facts: F,
    *,
    group: dist.ProcessGroup,
    remembered: MutableMapping[Hashable, Any],
    place: int = 0,
) -> list[F]:
    """Returns what each rank of a group knows, in its order, once all of them ask the same, in the same order.

    It communicates unless this rank remembers the answer: one that compiles a model again when the others do not must
    decide as it did with them, and not wait for them. ``signature`` is what must be the same on every rank, line by
    line. Raises where two ranks' signatures differ, or a rank asks nothing within the timeout of its group.
    """
    if is_alone(group):
        return [facts]
    question = ("agreement", place, group.group_name, tuple(signature))
    if question not in remembered:
        remembered[question] = _ask(tuple(signature), facts, group)
    answers: list[F] = remembered[question]
    return answers


def _ask(signature: tuple[str, ...], facts: F, group: dist.ProcessGroup) -> list[F]:
    _meet(signature, group)
    with outside_tracing():
        everyone = gathered((signature, facts), group)
    ranks = group_ranks(group)
    first = everyone[0][0]
    for rank, (other, _) in zip(ranks, everyone, strict=True):
        for index, (a, b) in enumerate(zip_longest(first, other, fillvalue="nothing more")):
            if a != b:
                raise AgreementError(
                    f"ranks {ranks[0]} and {rank} compile different collectives: number {index} is {a} on rank "
                    f"{ranks[0]}, {b} on rank {rank}; every rank must run the same modules in the same order"
                )
    return [known for _, known in everyone]


def _meet(signature: Sequence[str], group: dist.ProcessGroup) -> None:
    """Returns once every rank asks its next question: before, a collective would wait, or meet another there."""
    store, ranks, rank = group_store(group), group_ranks(group), dist.get_rank()
    number = store.add(f"graphpasses/agree/{rank}", 1)
    keys = {other: f"graphpasses/agree/{number}/{other}" for other in ranks}
    store.set(keys[rank], "")
    try:
        store.wait(list(keys.values()))
    except RuntimeError as error:
        missing = [other for other, key in keys.items() if not store.check([key])]
        if not missing:
            return  # the last one came just now
        store.delete_key(keys[rank])
        store.add(f"graphpasses/agree/{rank}", -1)
        raise AgreementError(
            f"rank {rank} compiles a graph whose collectives it shares with ranks {missing}, but these compiled none "
            f"within {store.timeout} ({'; '.join(signature[:2])}); every rank must compile the same graphs in the "
            "same order: TORCH_LOGS=recompiles shows why a rank compiles again"
        ) from error
