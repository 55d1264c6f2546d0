"""Describes a step's collectives in the same words on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from graphpasses.graph import ALL_TO_ALL
from graphpasses.graph.certificate import Launch
from graphpasses.graph.launches import call_of, ranks_of
from graphpasses.proof.core.values import Piece, Values
from graphpasses.proof.evaluated import Collective, Evaluated
from graphpasses.proof.terms import Term, name_of, pieces_of, sources_of

# Terms whose elements stand as those of others.
_BY_ELEMENT = ("cast", "mul", "div", "neg", "sum", "product", "bytes")


def launches_of(values: Values, before: Evaluated, after: Evaluated) -> tuple[Launch, ...]:
    """Returns the launches of a rewritten step, each with what it sends.

    What is sent is described by the inputs that have the same elements, by the launches of the step as it was
    captured, or by those of the rewritten step that brought it; sizes and padding, which differ between ranks, are
    not.
    """
    sent = _Sent(values, before.collectives)
    number = {launch.node: index for index, launch in enumerate(after.collectives)}
    brought = {source: number[node] for source, node in after.made.items() if node in number}
    return tuple(
        Launch(call_of(launch.node), ranks_of(launch.group), sent.contents(launch, brought))
        for launch in after.collectives
    )


class _Stand(NamedTuple):
    """How a piece of what is sent stands there, and where the captured step sends it."""

    first: tuple[int, int]  # the launch that sends its first element there, and where
    steps: tuple[tuple[int, int], ...]  # of each of its dims, here and there
    by: int = 0  # how far it is moved

    @property
    def moved(self) -> tuple[object, ...]:
        """How far it is moved, and the steps that became others."""
        return (self.by, *(each for each in self.steps if each[0] != each[1]))


class _Sent:
    """What the launches of a captured step send, and at which place."""

    def __init__(self, values: Values, launches: Iterable[Collective]) -> None:
        self._values = values
        self._launches: dict[int, int] = {}  # by the number of what is sent, the first that sends it
        self._owners: dict[int, list[int]] = {}  # by source, those that send some of it
        # By source, and by which of its elements a piece begins with: the first that sends that, and the piece.
        self._pieces: dict[int, dict[int, tuple[int, Piece]]] = {}
        for index, launch in enumerate(launches):
            for sent in launch.sent:
                self._launches.setdefault(sent.number, index)
                for piece in pieces_of(values, sent):
                    source, offset, _ = self._element(piece.source, piece.offset)
                    self._pieces.setdefault(source, {}).setdefault(offset, (index, piece))
                    for each in sources_of(values, piece.source):
                        self._owners.setdefault(each, []).append(index)

    def contents(self, launch: Collective, brought: Mapping[int, int]) -> dict[str, tuple[object, ...]]:
        """Returns the names of what a launch sends, in its order, each with how its elements stand there.

        That is how far they are moved from where the captured step sends them. Of an all-to-all, whose parts may have
        other sizes on each rank, it is how often an element follows that stood before.
        """
        found: dict[str, list[_Stand]] = {}
        for sent in launch.sent:
            number = self._launches.get(sent.number)
            for piece in pieces_of(self._values, sent):
                stand = self._stand(piece) if number is None else _Stand((number, piece.start), ())
                for source in sources_of(self._values, piece.source):
                    is_padding = self._values.key(source)[0] == "padding"
                    if name := self._name(source, brought):
                        found.setdefault(name, []).extend([] if is_padding else [stand])
        if launch.node.target == ALL_TO_ALL:
            return {name: (_turns(stands),) for name, stands in found.items()}
        return {name: tuple(moved for moved, _ in groupby(each.moved for each in its)) for name, its in found.items()}

    def _name(self, source: int, brought: Mapping[int, int]) -> str:
        if name := name_of(self._values, source):
            return name.removesuffix(" (_local_tensor)")
        if source in self._owners:
            return "launch " + "/".join(map(str, dict.fromkeys(self._owners[source])))
        return f"what collective {brought[source]} brings" if source in brought else ""

    def _stand(self, piece: Piece) -> _Stand:
        first = self._place(piece.source, piece.offset)
        steps = [(step, self._place(piece.source, piece.offset + read)[1] - first[1]) for _, step, read in piece.dims]
        return _Stand(first, tuple(steps), piece.start - first[1])

    def _place(self, source: int, offset: int) -> tuple[int, int]:
        """Returns the launch that sends an element, and where; of others -1, and where in its source it is."""
        made_of, number, size = self._element(source, offset)
        pieces = self._pieces.get(made_of, {})
        for launch, piece in [pieces[number]] if number in pieces else pieces.values():
            if (place := _place_in(piece, number)) is not None:
                return launch, place * size + offset % size
        return -1, offset

    def _element(self, source: int, offset: int) -> tuple[int, int, int]:
        """Returns the source, and its element, of which an element is computed, and as how many bytes."""
        size = 1
        while isinstance(key := self._values.key(source), Term) and key.kind in _BY_ELEMENT:
            source = key.operands[0]
            if key.kind == "bytes":
                size, offset = key.parameters[0], offset // key.parameters[0]
        return source, offset, size


def _turns(stands: Sequence[_Stand]) -> int:
    """Returns how often elements follow that the captured step sends before."""
    turns = sum(one.first > two.first for one, two in pairwise(stands))
    for each in stands:  # steps that grow less, and forwards, keep the order
        steps = [step for _, step in each.steps]
        turns += sum(step < 0 for step in steps) + sum(one < two for one, two in pairwise(steps))
    return turns


def _place_in(piece: Piece, offset: int) -> int | None:
    """Returns where a piece has an element of its source; None where it has not."""
    place, rest = piece.start, offset - piece.offset
    for size, step, read in sorted(piece.dims, key=lambda dim: -dim[2]):
        index = min(rest // read, size - 1) if read > 0 and rest > 0 else 0
        place, rest = place + index * step, rest - index * read
    return None if rest else place
