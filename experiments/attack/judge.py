"""What a proof says of a rewritten step, and what a run says."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from experiments.attack.rewrites import Rewrite
from experiments.attack.running import FLAVOURS, Bits, error_of, num_ranks_of, run
from graphpasses._torch.schemas import named_arguments
from graphpasses.errors import GraphPassesError
from graphpasses.graph import TrainGraph
from graphpasses.proof.prove import prove
from graphpasses.proof.real_memory import would_end_process

Answer = Literal["proved", "refused", "not proved", "payload", "raises", "unsound", "false refusal", "fails"]
ANSWERS: tuple[Answer, ...] = (
    "proved",
    "refused",
    "not proved",
    "payload",  # proved, and payloads of NaNs differ, no other bits
    "raises",  # proved, and it runs to an error where the step runs, which nobody overlooks
    "unsound",  # proved, and bits differ
    "false refusal",  # the proof says that bits differ of a rewrite that is right, and on no input they do
    "fails",  # the proof itself fails
)


@dataclass(frozen=True)
class Finding:
    """What came of a rewrite.

    Args:
        answer: what the proof said, and whether a run agrees.
        text: more of it.
    """

    answer: Answer
    text: str = ""

    @property
    def is_disagreement(self) -> bool:
        """Whether the proof is wrong."""
        return self.answer in ("unsound", "false refusal", "fails")


def rewritten(graph: TrainGraph, rewrite: Rewrite) -> TrainGraph | None:
    """Returns a rewritten copy of a graph; None if the rewrite makes calls that cannot run.

    Args:
        graph: a captured step, or a rewritten one.
        rewrite: of it.
    """
    mutant = graph.copy()
    try:
        rewrite.rewrite(mutant)
        mutant.graph.lint()
        if any(map(_would_end, mutant.graph.nodes)):
            return None
    except Exception:  # a random call may be malformed in any way
        return None
    return mutant


def _would_end(node: fx.Node) -> bool:
    if "scaled_dot_product" not in str(node.target):
        return False
    values = {name: each.meta["val"] for name, each in named_arguments(node).items() if isinstance(each, fx.Node)}
    return would_end_process(str(node.target), values)


def class_of(graph: TrainGraph, rewrite: Rewrite) -> str:
    """Returns what a rewrite does, with operators in the place of nodes.

    Args:
        graph: the step.
        rewrite: of it.
    """
    update = graph.update if rewrite.kind == "update" else None
    nodes = (graph.graph if update is None else update.module.graph).nodes
    names = {node.name: str(node.target) if node.op == "call_function" else node.op for node in nodes}
    text = re.sub(r"\b\w+\b(?![.(])", lambda found: names.get(found[0], found[0]), rewrite.text)
    return f"{rewrite.kind}: {text}"


@dataclass
class Attacked:
    """A captured step that is rewritten.

    Args:
        step: the step, of one rank.
    """

    step: TrainGraph
    _expected: dict[str, Bits] = field(default_factory=dict)

    def judge(self, mutant: TrainGraph, *, is_right: bool) -> Finding:
        """Returns what the proof and a run say of a rewritten step.

        Args:
            mutant: the rewritten step.
            is_right: whether its bits are known to be the step's.
        """
        try:
            certificate = prove(self.step, mutant)
        except GraphPassesError as error:
            is_false = is_right and self._difference(mutant, ())[0] in ("proved", "payload")
            return Finding("false refusal" if is_false else "refused", str(error))
        except Exception as error:  # the proof's own mistake, which the table counts
            return Finding("fails", f"{type(error).__name__}: {error}")
        unproved = dict(certificate.unproved)
        answer, text = self._difference(mutant, unproved) if "the graph" not in unproved else ("proved", "")
        if unproved and answer != "unsound":
            return Finding("not proved", ": ".join(certificate.unproved[0]))
        return Finding(answer, text)

    def _difference(self, mutant: TrainGraph, unproved: Collection[str]) -> tuple[Answer, str]:
        """Returns the first of what was proved that differs, or differs in payloads of NaNs alone."""
        found: tuple[Answer, str] = "proved", ""
        num_ranks = num_ranks_of(self.step)
        for flavour in FLAVOURS:
            if flavour not in self._expected:
                self._expected[flavour] = run(self.step, flavour, num_ranks)
            one, two = self._expected[flavour], run(mutant, flavour, num_ranks)
            if error := error_of(one):  # e.g. a probability that is NaN
                if flavour == "normal":
                    raise RuntimeError(f"the step does not run: {error}")
                continue
            if error := error_of(two):
                return "raises", error
            for name in {**one, **two}:
                begins_elsewhere = unproved and name[1].startswith("step 1")  # where what is not proved may differ
                if one.get(name) == two.get(name) or name[0] in unproved or begins_elsewhere:
                    continue
                if name not in one or name not in two or one[name][0] != two[name][0]:
                    return "unsound", ", ".join(name)
                found = "payload", ", ".join(name)
        return found
