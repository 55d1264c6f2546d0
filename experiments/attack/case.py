"""A program and rewrites of it: what the proof got wrong, in as few lines as can be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from experiments.attack.judge import Attacked, Finding, class_of, rewritten
from experiments.attack.program import Program
from experiments.attack.rewrites import rewrites_of
from graphpasses.graph import TrainGraph

_SITES = 12  # of a class that a graph is searched for: most programs have one or two


@dataclass(frozen=True)
class Case:
    """A program, and what is done to its step.

    Args:
        lines: the program's.
        rewrites: the classes of the rewrites, one after the other, as :func:`class_of` says.
        optimizer: whether the program's step has one.
        rows: whether the number of rows of its batch may vary.
        device: on which the step runs.
    """

    lines: tuple[str, ...]
    rewrites: tuple[str, ...]
    optimizer: bool = False
    rows: bool = False
    device: str = "cpu"

    @property
    def program(self) -> Program:
        """The program."""
        return Program(self.lines, self.optimizer, self.rows, self.device)

    def findings(self) -> Iterator[tuple[TrainGraph, TrainGraph, Finding]]:
        """Yields the step, each rewritten one, and what the proof says; nothing where the program is none."""
        with self.program.captured() as step:
            if step is None:
                return
            attacked = Attacked(step)
            for mutant, is_right in self._mutants(step, self.rewrites):
                yield step, mutant, attacked.judge(mutant, is_right=is_right)

    def _mutants(self, graph: TrainGraph, classes: tuple[str, ...]) -> Iterator[tuple[TrainGraph, bool]]:
        if not classes:
            yield graph, True
            return
        chosen = (each for each in rewrites_of(graph) if class_of(graph, each) == classes[0])
        for rewrite in islice(chosen, _SITES):
            mutant = rewritten(graph, rewrite)
            for last, is_right in self._mutants(mutant, classes[1:]) if mutant is not None else ():
                yield last, is_right and rewrite.is_right

    def disagreement(self, answer: str = "") -> tuple[TrainGraph, TrainGraph, Finding] | None:
        """Returns the first rewritten step of which the proof is wrong; None if there is none.

        Args:
            answer: wrong in this way alone.
        """
        for found in self.findings():
            if found[2].is_disagreement and answer in ("", found[2].answer):
                return found
        return None

    def script(self, seen: Finding | None = None) -> str:
        """Returns a Python script that says what the proof got wrong; run, it ends with 1 if that is still so.

        Args:
            seen: what was found before, which is told where proof and run agree by now.
        """
        found = self.disagreement()
        text = "proof and run agree"
        if seen is not None and found is None:
            text = "\n# ".join([f"{text} when asked again; before: {seen.answer}", *seen.text.splitlines()])
        if found is not None:
            one, two = (str(graph.graph).splitlines() for graph in found[:2])
            changed = [line for line in difflib.unified_diff(one, two, n=0) if line[:2] in ("- ", "+ ")]
            text = "\n# ".join([found[2].answer, *found[2].text.splitlines(), *changed])
        return (
            f"# {text}\n#\n# {self.program.source.replace(chr(10), chr(10) + '# ').rstrip('# ')}\n"
            f"import sys\n\nfrom experiments.attack.case import Case\n\n"
            f"CASE = {self!r}\nsys.exit(CASE.disagreement() is not None)\n"
        )


def shrink(case: Case, answer: str) -> Case:
    """Deletes rewrites and statements as long as the proof is wrong.

    Args:
        case: of which the proof is wrong.
        answer: how.
    """
    while True:
        found = next((each for each in _smaller(case) if each.disagreement(answer)), None)
        if found is None:
            return case
        case = found


def _smaller(case: Case) -> Iterator[Case]:
    for index in range(len(case.rewrites) if len(case.rewrites) > 1 else 0):
        yield replace(case, rewrites=case.rewrites[:index] + case.rewrites[index + 1 :])
    if case.optimizer:
        yield replace(case, optimizer=False)
    if case.rows:
        yield replace(case, rows=False)
    lines = case.lines
    for index in reversed(range(len(lines) - 1)):
        before, after = lines[:index], lines[index + 1 :]
        yield replace(case, lines=before + after)
        name, _, value = lines[index].partition(" = ")
        for operand in dict.fromkeys(re.findall(r"\ba\d+\b|\bself\.\w+\b|\bx\b", value)):
            later = tuple(re.sub(rf"\b{re.escape(name)}\b", operand, line) for line in after)
            yield replace(case, lines=before + later)
    terms = lines[-1].removeprefix("return ").split(" + ")
    for index in range(len(terms) if len(terms) > 1 else 0):
        rest = " + ".join(terms[:index] + terms[index + 1 :])
        yield replace(case, lines=(*lines[:-1], f"return {rest}"))
