"""Command line: ``python -m experiments.attack --help``."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from experiments.attack.case import Case, shrink
from experiments.attack.judge import ANSWERS, Answer, Attacked, Finding, class_of, rewritten
from experiments.attack.program import random_program
from experiments.attack.rewrites import Rewrite, rewrites_of
from experiments.attack.right_rewrites import judge_right_rewrites
from graphpasses.graph import TrainGraph
from graphpasses.terminal import make_console

NUM_OF_A_KIND = 3  # rewrites of a graph: capturing it costs as much as some of them
NEARLY_RIGHT = {"identity", "law", "elsewhere", "move", "common calls", "in place", "update"}
SHARE_TWICE = 0.3  # of rewrites that are proved, after which comes another


def main(
    what: tyro.conf.Positional[Literal["random", "right"]] = "random",
    minutes: float = 1.0,
    seed: int = 0,
    num_graphs: int | None = None,
    num_shrunk: int = 3,
    out: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> int:
    """Rewrites random training steps at random, and compares what the proof says with a run, bit for bit.

    Exit code 0 if the proof was never wrong, else 1.

    Args:
        what: random rewrites, or the table of common ones that are right.
        minutes: so long.
        seed: decides the programs and the rewrites.
        num_graphs: so many programs at most.
        num_shrunk: of each kind of rewrite so many disagreements are shrunk and printed.
        out: folder for the scripts that show where the proof was wrong.
        device: on which steps run; a GPU with torch's deterministic algorithms, without lookups and collectives.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by the first product
        torch.use_deterministic_algorithms(True)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # calls that cannot run
    console = make_console()
    if what == "right":
        return _right(console)
    counts: defaultdict[str, Counter[Answer]] = defaultdict(Counter)
    shrunk: Counter[tuple[str, Answer]] = Counter()
    seen: set[tuple[tuple[str, ...], Answer]] = set()
    start, done, refused = time.monotonic(), 0, 0
    for index in range(sys.maxsize if num_graphs is None else num_graphs):
        if time.monotonic() - start > 60 * minutes:
            break
        found = list(_attack(random.Random(f"{seed} {index}"), device))
        done, refused = done + 1, refused + (not found)
        for kind, case, finding in found:
            counts[kind][finding.answer] += 1
            key = case.rewrites, finding.answer
            if not finding.is_disagreement or key in seen or shrunk[kind, finding.answer] >= num_shrunk:
                continue
            seen.add(key)
            shrunk[kind, finding.answer] += 1
            script = shrink(case, finding.answer).script(finding)
            console.print(script, markup=False)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{finding.answer.replace(' ', '_')}_{len(seen)}.py").write_text(script)
    seconds = time.monotonic() - start
    console.print(make_table(counts))
    total = sum(counts.values(), Counter[Answer]())
    console.print(
        f"{total.total()} rewrites of {done} programs, {refused} not captured: {total['unsound']} unsound, "
        f"{total['false refusal']} false refusals; {seconds:.0f} s, {done / seconds:.1f} programs a second"
    )
    return int(any(total[answer] for answer in ("unsound", "false refusal", "fails")))


def _right(console: Console) -> int:
    table = Table("rewrite", "proof", "it says", title="Common rewrites that keep all bits")
    counts: Counter[Answer] = Counter()
    for name, finding in judge_right_rewrites():
        counts[finding.answer] += 1
        table.add_row(name, finding.answer, finding.text.partition("\n")[0])
    console.print(table)
    console.print(f"of {counts.total()}: {', '.join(f'{count} {answer}' for answer, count in counts.items())}")
    return int(counts["proved"] + counts["payload"] + counts["not proved"] < counts.total())


def _attack(rng: random.Random, device: str) -> Iterator[tuple[str, Case, Finding]]:
    """Yields of a random program some rewrites of each kind, and what came of them."""
    program = random_program(rng, rng.randint(1, 6), device)
    with program.captured() as step:
        if step is not None:
            yield from _attack_step(rng, Case(program.lines, (), program.optimizer, program.rows, device), step)


def _attack_step(rng: random.Random, case: Case, step: TrainGraph) -> Iterator[tuple[str, Case, Finding]]:
    attacked = Attacked(step)
    for kind, rewrites in _by_kind(step).items():
        count = NUM_OF_A_KIND * (2 if kind in NEARLY_RIGHT else 1)
        for rewrite in rng.sample(rewrites, min(count, len(rewrites))):
            mutant = rewritten(step, rewrite)
            if mutant is None:
                continue
            once = replace(case, rewrites=(class_of(step, rewrite),))
            finding = attacked.judge(mutant, is_right=rewrite.is_right)
            yield kind, once, finding
            if finding.answer != "proved" or rng.random() > SHARE_TWICE:
                continue
            other = rng.choice(rng.choice(list(_by_kind(mutant).values())))
            if (last := rewritten(mutant, other)) is not None:
                twice = replace(case, rewrites=(*once.rewrites, class_of(mutant, other)))
                yield "two", twice, attacked.judge(last, is_right=rewrite.is_right and other.is_right)


def _by_kind(graph: TrainGraph) -> dict[str, list[Rewrite]]:
    kinds: dict[str, list[Rewrite]] = {}
    for rewrite in rewrites_of(graph):
        kinds.setdefault(rewrite.kind, []).append(rewrite)
    return kinds


def make_table(counts: defaultdict[str, Counter[Answer]]) -> Table:
    """Returns the table: for each kind of rewrite, how often the proof said what, and was wrong.

    Args:
        counts: by kind, of each answer.
    """
    table = Table("kind", title="Random rewrites of random steps, and what the proof says")
    for answer in ANSWERS:
        table.add_column(answer, justify="right")
    for kind, found in counts.items():
        table.add_row(kind, *(str(found[answer]) for answer in ANSWERS))
    table.add_section()
    total = sum(counts.values(), Counter[Answer]())
    table.add_row("all", *(str(total[answer]) for answer in ANSWERS))
    return table


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
