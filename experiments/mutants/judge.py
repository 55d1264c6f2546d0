"""Make mutants of a graph, run each, and ask each checker."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import graphpasses
from experiments.mutants.edits import Edit, MalformedError, WrongPass
from experiments.mutants.effect_mutators import EFFECT_MUTATORS
from experiments.mutants.graphs import Pair
from experiments.mutants.mutators import VALUE_MUTATORS
from experiments.mutants.running import Outcome, run, run_apart
from graphpasses.errors import GraphPassesError
from graphpasses.graph import TrainGraph, find_collectives
from graphpasses.graph.certificate import find_unlike_launch
from graphpasses.passes.runner import Pipeline

__all__ = ["CHECKERS", "KINDS", "Judged", "Result", "complaints", "edits_of", "judge", "mutants_of"]

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
        verdicts: what each checker says of it.
    """

    graph: str
    edit: Edit
    result: Result
    verdicts: Mapping[str, Verdict]

    @property
    def is_harmful(self) -> bool:
        """Whether it must be rejected."""
        return self.result != "same bits"

    @property
    def is_rejected(self) -> bool:
        """Whether a checker rejects it."""
        return any(verdict.rejected for verdict in self.verdicts.values())

    @property
    def is_unproved(self) -> bool:
        """Whether nothing rejects it, and a checker says what it could not follow."""
        return not self.is_rejected and any(verdict.unproved for verdict in self.verdicts.values())

    @property
    def is_missed(self) -> bool:
        """Whether it is harmful, and nothing is said of it."""
        return self.is_harmful and not self.is_rejected and not self.is_unproved


@dataclass(frozen=True)
class Verdict:
    """What a checker says.

    Args:
        rejected: why it rejects a graph; empty if it does not.
        unproved: what it could not follow; empty if nothing.
    """

    rejected: str = ""
    unproved: str = ""


Checker = Callable[[Pair, TrainGraph, TrainGraph, Edit | None], Verdict]
"""Given a pair, a graph of it, a mutant of that, and the edit that made it; or the graph itself, and None."""


def _verify(pair: Pair, graph: TrainGraph, mutant: TrainGraph, edit: Edit | None) -> Verdict:
    """What is checked after every pass."""
    Pipeline((WrongPass(edit),) if edit else ()).run(graph, prove=False)
    return Verdict()


def _prove(pair: Pair, graph: TrainGraph, mutant: TrainGraph, edit: Edit | None) -> Verdict:
    """What is proved at the end of a pipeline, against the captured graph; all ranks must launch the same."""
    layout = pair.layout if graph is pair.after else None
    certificate = graphpasses.prove(pair.before, mutant, layout=layout)
    if edit is not None and edit.rank is not None:
        others = graphpasses.prove(pair.before, graph, layout=layout)
        if find_unlike_launch(certificate.launches, others.launches) is not None:
            return Verdict("ranks launch other collectives")
    for name, why in certificate.unproved:
        more = f" (and {len(certificate.unproved) - 1} more)"
        return Verdict(unproved=f"{name}{more}: {' '.join(why.split())}")
    return Verdict()


CHECKERS: dict[str, Checker] = {"verify": _verify, "prove": _prove}


def _verdicts(pair: Pair, graph: TrainGraph, mutant: TrainGraph, edit: Edit | None = None) -> dict[str, Verdict]:
    verdicts = {}
    for name, check in CHECKERS.items():
        try:
            verdicts[name] = check(pair, graph, mutant, edit)
        except GraphPassesError as error:
            verdicts[name] = Verdict(str(error))
        except Exception as error:  # a checker's own mistake, which the table counts
            verdicts[name] = Verdict(unproved=f"{name} failed: {type(error).__name__}: {error}")
    return verdicts


def complaints(pair: Pair) -> dict[str, Verdict]:
    """Returns what each checker says against what the passes, which are correct, made of a graph.

    Args:
        pair: the graph before and after the passes.
    """
    verdicts = _verdicts(pair, pair.after, pair.after)
    return {name: verdict for name, verdict in verdicts.items() if verdict.rejected or verdict.unproved}


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
        yield Judged(name, edit, _result(pair, played, expected), _verdicts(pair, graph, mutant, edit))


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
