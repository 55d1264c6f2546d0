"""A program and a class of rewrites of it: what the proof got wrong, in as few lines as can be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from experiments.attack.judge import Attacked, Finding
from experiments.attack.program import Program
from experiments.attack.rewrites import Rewrite

__all__ = ["Case", "shrink"]

_SITES = 12  # of a class that a graph is searched for: most programs have one or two


@dataclass(frozen=True)
class Case:
    """A program, and what is done to its step.

    Args:
        program: the step's model.
        rewrite: the class of the rewrites, as :meth:`Attacked.class_of` says.
    """

    program: Program
    rewrite: str

    def findings(self) -> Iterator[tuple[Attacked, Rewrite, Finding]]:
        """Yields what comes of each rewrite of the class; nothing where the program is none."""
        step = self.program.capture()
        if step is None:
            return
        attacked = Attacked(step)
        chosen = (each for each in attacked.rewrites if attacked.class_of(each) == self.rewrite)
        for rewrite in islice(chosen, _SITES):
            finding = attacked.judge(rewrite)
            if finding is not None:
                yield attacked, rewrite, finding

    def disagreement(self, answer: str = "") -> tuple[Attacked, Rewrite, Finding] | None:
        """Returns the first rewrite of which the proof is wrong; None if there is none.

        Args:
            answer: of this kind alone.
        """
        for found in self.findings():
            if found[2].is_disagreement and answer in ("", found[2].answer):
                return found
        return None

    def script(self) -> str:
        """Returns a Python script that shows the disagreement: the model, what becomes of its graph, and a check."""
        found = self.disagreement()
        if found is None:
            return f"# {self.rewrite}: proof and run agree\n{self.program.source}"
        attacked, rewrite, finding = found
        mutant = attacked.step.copy()
        rewrite.rewrite(mutant)
        one, two = (str(graph.graph).splitlines() for graph in (attacked.step, mutant))
        changed = [
            line for line in difflib.unified_diff(one, two, n=0, lineterm="") if line[:2] in ("- ", "+ ")
        ]
        says = "".join(f"# {line}\n" for line in (*finding.text.splitlines(), *changed))
        lines = "".join(f"    {line!r},\n" for line in self.program.lines)
        return (
            f"# {finding.answer} | {self.rewrite}\n{says}\n"
            f"from experiments.attack.case import Case\nfrom experiments.attack.program import Program\n\n"
            f"LINES = (\n{lines})\n"
            f"print(Case(Program(LINES, {self.program.optimizer}), {self.rewrite!r}).script())\n"
        )


def shrink(case: Case, answer: str) -> Case:
    """Deletes statements as long as the proof is wrong.

    Args:
        case: of which the proof is wrong.
        answer: how.
    """
    while True:
        smaller = (replace(case, program=program) for program in _smaller(case.program))
        found = next((each for each in smaller if each.disagreement(answer)), None)
        if found is None:
            return case
        case = found


def _smaller(program: Program) -> Iterator[Program]:
    if program.optimizer:
        yield replace(program, optimizer=False)
    lines = program.lines
    for index in reversed(range(len(lines) - 1)):
        rest = lines[:index], lines[index + 1 :]
        yield replace(program, lines=rest[0] + rest[1])
        name, _, value = lines[index].partition(" = ")
        for operand in dict.fromkeys(re.findall(r"\ba\d+\b|\bself\.\w+\b|\bx\b", value)):
            later = tuple(re.sub(rf"\b{name}\b", operand, line) for line in rest[1])
            yield replace(program, lines=rest[0] + later)
    terms = lines[-1].removeprefix("return ").split(" + ")
    for index in range(len(terms) if len(terms) > 1 else 0):
        yield replace(
            program, lines=(*lines[:-1], f"return {' + '.join(terms[:index] + terms[index + 1 :])}")
        )
