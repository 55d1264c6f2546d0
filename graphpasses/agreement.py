"""How ranks agree while they compile.

Every rank launches the same collectives in the same order. A pass that changes them must therefore decide the same on
every rank. But a rank's graph shows only what this rank needs: one without tables does not read the ids that it
receives. So each rank reports its facts, and every rank combines all reports by the same pure function::

    sequence = CollectiveSequence(graph)
    agreed = sequence.agree(question, facts)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from graphpasses._torch.group_ranks import gathered, group_ranks, group_store, named_group
from graphpasses._torch.tracing import outside_tracing
from graphpasses.errors import AgreementError
from graphpasses.graph import ALL_TO_ALL, WAIT, TrainGraph, argument
from graphpasses.graph.nodes import collective_group

F = TypeVar("F")  # the facts of one rank
A = TypeVar("A")  # what the ranks agree on


@dataclass(frozen=True)
class Question(Generic[F, A]):
    """What a pass asks all ranks before it changes their collectives.

    ``pass_name`` is the pass, which a user can disable; ``topic`` says what the facts are about. ``combine``
    returns what the ranks agree on; it gets the facts of each rank, in group order, and nothing else.
    ``contradiction`` gets what was agreed and this rank's facts, and says what is wrong if they differ: the rest of
    a sentence that begins with "rank 3", or ``""``. They may differ if a rank compiles again while the others do
    not: it must do what they agreed on, or refuse.
    """

    pass_name: str
    topic: str
    combine: Callable[[list[F]], A]
    contradiction: Callable[[A, F], str]


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

    def agree(self, question: Question[F, F], facts: F) -> F:
        """Returns what all ranks agree on that share a group, or groups that share a rank.

        All ranks must call it in the same order. They exchange facts group after group, as along the axes of a
        mesh, so what one rank knows reaches all. Facts are anything that can be pickled. Raises as :func:`exchange`,
        and where this rank compiles again, and its facts contradict what was agreed.
        """
        agreed = facts
        for group in self.groups:
            agreed = question.combine(self._exchange(question, agreed, group))
        return _checked(question, agreed, facts)

    def agree_in_group(self, group: object, question: Question[F, A], facts: F) -> A:
        """Returns what the ranks of one group agree on.

        All ranks must call it in the same order.
        """
        agreed = question.combine(self._exchange(question, facts, group))
        return _checked(question, agreed, facts)

    def _exchange(self, question: Question[F, A], facts: F, group: object) -> list[F]:
        topic = f"{question.topic} of the {self._graph.stage.value} graph, for {question.pass_name}"
        signature = [topic, *self._lines]
        return exchange(
            signature,
            facts,
            group=named_group(str(group)),
            remembered=self._graph.remembered,
            place=self._graph.place,
        )


def _checked(question: Question[F, A], agreed: A, facts: F) -> A:
    if wrong := question.contradiction(agreed, facts):
        raise AgreementError(f"rank {dist.get_rank()} {wrong}. Disable {question.pass_name!r} for this model")
    return agreed


def _is_waited_for_once(launch: fx.Node) -> bool:
    return [user.target for user in launch.users] == [WAIT]


def _describe(node: fx.Node, group: int) -> str:
    value = argument(node).meta["val"] if isinstance(node.args[0], fx.Node) else None
    tensor = f" of {value.dtype} on {value.device.type}" if isinstance(value, torch.Tensor) else ""
    waits = "" if _is_waited_for_once(node) else " (not waited for once)"
    return f"{node.target}{tensor} in process group {group}{waits}"


# ---- classes: which of some things are the same, as each rank sees it ------------------------------------


def common_classes(classes: list[list[int]]) -> list[int]:
    """Returns which things are of one class on every rank.

    ``classes`` has, per rank, a number for each thing: things of one class have one number, and -1 is of no class.
    Returns for each thing the index of the first one of its class; -1 for what is of no class on some rank.

    Example:
        >>> common_classes([[0, 0, 0, 3], [5, 5, 2, -1]])
        [0, 0, 2, -1]
    """
    first: dict[tuple[int, ...], int] = {}
    by_thing = enumerate(zip(*classes, strict=True))
    return [-1 if -1 in seen else first.setdefault(seen, index) for index, seen in by_thing]


def breaks_class(agreed: Sequence[int], own: Sequence[int]) -> bool:
    """Whether this rank sees a difference within a class on which all ranks agreed.

    Example:
        >>> breaks_class([0, 0, 2, -1], [7, 7, 7, 7]), breaks_class([0, 0], [7, 8])
        (False, True)
    """
    return any(
        first >= 0 and (own[index] < 0 or own[index] != own[first]) for index, first in enumerate(agreed)
    )


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
    """Returns what each rank of a group knows, once all of them ask the same.

    All ranks must call it in the same order. It communicates unless this rank remembers the answer: a rank may
    compile a model again when the others do not (its batches became dynamic). It must then decide as it did
    together with them, and must not wait for them. ``signature`` is what must be the same on every rank, line by
    line; ``remembered`` is :attr:`~graphpasses.graph.TrainGraph.remembered`. Returns the facts of each rank, in
    group order; ``[facts]`` alone where the group has no other process.

    Raises:
        AgreementError: the signatures of two ranks differ, on every rank of the group; or a rank asks nothing within
            the timeout of ``init_process_group``, on those that wait for it.
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
    """Returns once every rank of ``group`` asks its next question.

    They meet at the store: a collective that another rank does not launch waits, or meets another one there.
    """
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
