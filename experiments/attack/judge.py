"""What a proof says of a rewritten step, and what a run says."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import fx

from experiments.attack.rewrites import Rewrite, rewrites_of
from experiments.attack.running import FLAVOURS, Bits, run
from graphpasses.errors import GraphPassesError
from graphpasses.graph import TrainGraph
from graphpasses.proof.prove import prove

__all__ = ["ANSWERS", "Answer", "Attacked", "Finding"]

Answer = Literal["proved", "refused", "not proved", "payload", "fails", "unsound", "false refusal"]
ANSWERS: tuple[Answer, ...] = (
    "proved",
    "refused",
    "not proved",
    "payload",  # proved, and payloads of NaNs differ, no other bits
    "fails",  # the proof itself fails
    "unsound",  # proved, and bits differ
    "false refusal",  # the proof says that bits differ of a rewrite that is right, and on no input they do
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


@dataclass
class Attacked:
    """A captured step that is rewritten.

    Args:
        step: the step, of one rank.
    """

    step: TrainGraph
    _expected: dict[str, Mapping[str, Bits]] = field(default_factory=dict)

    @cached_property
    def rewrites(self) -> list[Rewrite]:
        """All rewrites of the step, always in one order."""
        return list(rewrites_of(self.step))

    def class_of(self, rewrite: Rewrite) -> str:
        """Returns what a rewrite does, with operators in the place of nodes; two of one class are of one kind.

        Args:
            rewrite: of ``step``.
        """
        names = {node.name: node.name if node.op == "output" else str(node.target) for node in self._nodes()}
        text = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), rewrite.text)
        return f"{rewrite.kind}: {re.sub(r'arg[0-9]+_1', 'input', text)}"

    def _nodes(self) -> Iterator[fx.Node]:
        yield from self.step.graph.nodes
        if self.step.update is not None:
            yield from self.step.update.module.graph.nodes

    def judge(self, rewrite: Rewrite) -> Finding | None:
        """Returns what came of a rewrite; None if it makes no graph whose calls can run.

        Args:
            rewrite: of ``step``.
        """
        mutant = self.step.copy()
        try:
            rewrite.rewrite(mutant)
            mutant.graph.lint()
        except Exception:  # noqa: BLE001 - a random call may be malformed in any way
            return None
        return self.compare(mutant, is_right=rewrite.is_right)

    def compare(self, mutant: TrainGraph, *, is_right: bool) -> Finding:
        """Returns what the proof and a run say of a rewritten step.

        Args:
            mutant: the rewritten step.
            is_right: whether its bits are known to be the step's.
        """
        try:
            certificate = prove(self.step, mutant)
        except GraphPassesError as error:
            if is_right and not self._difference(mutant, ()).partition("payload")[0]:
                return Finding("false refusal", str(error))
            return Finding("refused", str(error))
        except Exception as error:  # noqa: BLE001 - the proof's own mistake, which the table counts
            return Finding("fails", f"{type(error).__name__}: {error}")
        unproved = [name for name, _ in certificate.unproved]
        found = "" if "the graph" in unproved else self._difference(mutant, unproved)
        if found and not found.startswith("payload"):
            return Finding("unsound", found)
        if unproved:
            return Finding("not proved", ": ".join(certificate.unproved[0]))
        return Finding("payload" if found else "proved", found)

    def _difference(self, mutant: TrainGraph, unproved: Collection[str]) -> str:
        """Returns the first of what was proved that differs, or differs in payloads of NaNs; or nothing."""
        payload = ""
        for flavour in FLAVOURS:
            if flavour not in self._expected:
                try:
                    self._expected[flavour] = run(self.step, flavour)
                except RuntimeError:  # bernoulli of a NaN
                    self._expected[flavour] = {}
            if not (expected := self._expected[flavour]):
                continue
            try:
                found = run(mutant, flavour)
            except (RuntimeError, IndexError, KeyError) as error:  # of a call on real tensors
                return f"it fails: {' '.join(str(error).split())[:150]}"
            for name in {**expected, **found}:
                one, two = expected.get(name), found.get(name)
                if one == two or name.partition(", ")[2] in unproved:
                    continue
                if one is None or two is None or one[0] != two[0]:
                    return f"{name}, with {flavour} inputs"
                payload = f"payload of {name}"
        return payload
