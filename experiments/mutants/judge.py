"""Make mutants of a graph, run each, and ask each checker."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from experiments.mutants.edits import Edit, MalformedError, WrongPass
from experiments.mutants.effect_mutators import EFFECT_MUTATORS
from experiments.mutants.graphs import Pair
from experiments.mutants.mutators import VALUE_MUTATORS
from experiments.mutants.running import Outcome, run, run_apart
from graphpasses.errors import GraphPassesError
from graphpasses.graph import TrainGraph, find_collectives
from graphpasses.passes.runner import GraphPass, Pipeline

__all__ = ["CHECKERS", "KINDS", "Judged", "Result", "edits_of", "judge", "mutants_of", "refused_pipelines"]

Result = Literal["same bits", "other bits", "hangs", "fails"]
KINDS = (
    "operands",
    "inputs",
    "outputs",
    "operator",
    "arguments",
    "dtype",
    "scale",
    "strides",
    "pieces",
    "bucket",
    "group",
    "additions",
    "wait",
    "write",
    "random",
    "one rank",
)
"""Kinds of mutants, in the order of the table."""


@dataclass(frozen=True)
class Judged:
    """What is known of a mutant.

    Args:
        graph: name of the graph that was mutated.
        edit: what was done to it.
        result: what happened when it ran.
        rejected: why, by checker; those that accepted it are not in it.
    """

    graph: str
    edit: Edit
    result: Result
    rejected: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_harmful(self) -> bool:
        """Whether it must be rejected."""
        return self.result != "same bits"

    @property
    def is_missed(self) -> bool:
        """Whether it is harmful, and nothing rejects it."""
        return self.is_harmful and not self.rejected


Checker = Callable[[Pair, TrainGraph, tuple[GraphPass, ...]], object]
"""Given a pair, a graph of it and passes: raises if they must not rewrite it so."""


def _verify(pair: Pair, graph: TrainGraph, passes: tuple[GraphPass, ...]) -> object:
    return Pipeline(passes).run(graph)


CHECKERS: dict[str, Checker] = {"verify": _verify}


def _rejected(pair: Pair, graph: TrainGraph, passes: tuple[GraphPass, ...]) -> dict[str, str]:
    rejected = {}
    for name, check in CHECKERS.items():
        try:
            check(pair, graph, passes)
        except GraphPassesError as error:
            rejected[name] = str(error)
    return rejected


def refused_pipelines(pair: Pair) -> list[str]:
    """Returns a line for each checker that rejects what the passes, which are correct, made of a graph.

    Args:
        pair: the graph before and after the passes.
    """
    rejected = _rejected(pair, pair.after, ())
    return [f"{pair.name} is refused by {name}: {reason}" for name, reason in rejected.items()]


def edits_of(graph: TrainGraph) -> dict[str, list[Edit]]:
    """Returns all edits that mutators have for a graph, by kind."""
    edits: dict[str, list[Edit]] = {}
    for mutator in (*VALUE_MUTATORS, *EFFECT_MUTATORS):
        for edit in mutator(graph):
            edits.setdefault(edit.kind, []).append(edit)
    return edits


def mutants_of(name: str, graph: TrainGraph, num_of_a_kind: int) -> Iterator[tuple[Edit, TrainGraph]]:
    """Yields mutants whose calls can run on their inputs, the same ones each time.

    Args:
        name: of the graph; it decides which edits are chosen.
        graph: what is mutated.
        num_of_a_kind: at most so many of each kind.
    """
    for kind, edits in sorted(edits_of(graph).items()):
        random.Random(f"{name}: {kind}").shuffle(edits)
        yield from itertools.islice(_well_formed(graph, edits), num_of_a_kind)


def _well_formed(graph: TrainGraph, edits: list[Edit]) -> Iterator[tuple[Edit, TrainGraph]]:
    for edit in edits:
        mutant = graph.copy()
        try:
            edit.rewrite(mutant)
        except MalformedError:
            continue
        yield edit, mutant


def judge(pair: Pair, name: str, graph: TrainGraph, num_of_a_kind: int) -> Iterator[Judged]:
    """Yields what is known of each mutant of a graph.

    Args:
        pair: to which the graph belongs.
        name: of the graph.
        graph: what is mutated.
        num_of_a_kind: at most so many mutants of each kind.
    """
    ranks = range(pair.cluster.num_ranks)
    expected = _run(pair, [graph for _ in ranks])
    if expected.failure:
        raise RuntimeError(f"{name} does not run: {expected.failure}")
    for edit, mutant in mutants_of(name, graph, num_of_a_kind):
        mutated = ranks if edit.rank is None else (edit.rank % len(ranks),)
        played = [mutant if rank in mutated else graph for rank in ranks]
        rejected = _rejected(pair, graph, (WrongPass(edit),))
        yield Judged(name, edit, _result(pair, played, expected), rejected)


def _run(pair: Pair, graphs: list[TrainGraph], *, is_late: bool = False) -> Outcome:
    play = run_apart if pair.is_fragile else run
    return play(graphs, pair.inputs, pair.cluster, is_late=is_late)


def _result(pair: Pair, graphs: list[TrainGraph], expected: Outcome) -> Result:
    """Runs a mutant: at first with collectives that are done at once, then with such as take their time."""
    has_waits = bool(find_collectives(graphs[0].graph))
    for is_late in (False, True) if has_waits else (False,):
        outcome = _run(pair, graphs, is_late=is_late)
        if outcome.failure:
            return "hangs" if outcome.is_hang else "fails"
        if outcome.bits != expected.bits:
            return "other bits"
    return "same bits"
