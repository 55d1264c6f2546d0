"""Where a task's captured step first differs from eager: operator, pass and rewrite, and a script that shows it."""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from graphpasses.errors import TaskError
from graphpasses.fsdp.layout import Layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import CapturedStep
from graphpasses.graph.nodes import reach
from graphpasses.parity.compare import compare_runs
from graphpasses.parity.first_difference import Difference
from graphpasses.parity.location import Location, locate_runs
from graphpasses.parity.operators import operator_file
from graphpasses.parity.record import ChosenOperators
from graphpasses.parity.run_file import Run, read_run
from graphpasses.parity.training import Task, train_eager, train_graph
from graphpasses.passes.graph_diff import read_lines
from graphpasses.passes.runner import Pipeline
from graphpasses.simulate.rings import Topology

_MAX_LINES = 12  # of the rewrite that are shown


def locate_task(task: Task, topology: Topology, num_steps: int, folder: Path, *, source: str = "") -> Location:
    """Finds the operator at which a task's rewritten step first differs from eager, and the pass that caused it.

    Trains both ways; runs the first step that differs again, with its operators recorded; then with fewer and fewer
    passes, until a pass is found before which the step has eager's bits, and after which it does not.

    Args:
        task: what to train.
        topology: the cluster.
        num_steps: how many steps to look for a difference.
        folder: for run files, and for the script that reproduces it.
        source: the file or module that the task was loaded from; without it there is a script only where one operator
            shows the difference.

    Raises:
        ClusterError, TaskError: as :func:`train_eager`; or the second run of a step equals eager.

    Example:
        >>> import tempfile
        >>> from torch.distributed.fsdp import fully_shard
        >>> task = Task(
        ...     model=lambda: nn.Linear(4, 4),
        ...     shard=lambda model, mesh: fully_shard(model, mesh=mesh),
        ...     loss_fn=lambda model, x: model(x).sum(),
        ...     batch=lambda step, rank: (torch.full((2, 4), float(rank)),),
        ... )
        >>> locate_task(task, Topology(2, gpus_per_node=2), 1, Path(tempfile.mkdtemp())).difference is None
        True
    """
    trials = _Trials(task, topology, folder)
    all_passes = None
    step = trials.first_difference(num_steps, all_passes, operators=[0])
    if step is None:
        return Location(None)
    if step > 0:
        trials.first_difference(step + 1, all_passes, operators=[step])
    location = locate_runs(*trials.runs(all_passes))
    if location.difference is None:
        raise TaskError(
            f"the runs parted in step {step}, and did not when it was run again: the task is no function of its "
            "arguments. Let model() and batch(step, rank) return the same whenever they are called"
        )

    def differs(num_passes: int) -> bool:
        return trials.first_difference(step + 1, num_passes, operators=[step]) is not None

    passes = range(len(trials.passes))
    bad = 0 if differs(0) else bisect.bisect_left(passes, True, lo=1, key=differs)
    name = trials.passes[bad - 1] if bad else "capture"
    text = trials.operator_script(location.difference)
    if not text and source:
        text = _step_script(location.difference, source, topology, step, bad)
    script = folder / "reproduce.py" if text else None
    if script is not None:
        script.write_text(text)
    return replace(location, pass_name=name, culprit=trials.culprit(bad, step), script=script)


@dataclass
class _Trials:
    """Runs of a task: eagerly, and with the first so many of its passes."""

    task: Task
    topology: Topology
    folder: Path
    graphs: dict[int | None, CapturedStep] = field(default_factory=dict)
    passes: list[str] = field(default_factory=list)

    def path(self, num_passes: int | None) -> Path:
        return self.folder / ("graph.jsonl" if num_passes is None else f"after-{num_passes}-passes.jsonl")

    def runs(self, num_passes: int | None) -> tuple[Run, Run]:
        return read_run(self.folder / "eager.jsonl"), read_run(self.path(num_passes))

    def first_difference(self, num_steps: int, num_passes: int | None, operators: Collection[int]) -> int | None:
        """Trains with the first passes, and returns the first step that differs from eager's."""
        if num_passes is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.train_eager(num_steps, operators)
        self.train_graph(num_steps, num_passes, operators)
        divergence = compare_runs(*self.runs(num_passes), allow=["steps"]).divergence
        return None if divergence is None else divergence.step

    def train_eager(self, num_steps: int, operators: ChosenOperators) -> None:
        train_eager(self.task, self.topology, num_steps, self.folder / "eager.jsonl", operators=operators)

    def train_graph(self, num_steps: int, num_passes: int | None, operators: ChosenOperators) -> None:
        def rewrite(captured: CapturedStep, plan: BucketPlan, layout: Layout) -> CapturedStep:
            pipeline = self.task.pipeline(plan, layout)
            passes = pipeline.at(captured.stage).passes
            self.passes = [p.name for p in passes]
            # What a proof refuses is to be run here.
            graph = Pipeline(passes[:num_passes]).run(captured, prove=False)
            self.graphs.setdefault(num_passes, graph)  # the first rank's; others may have other shapes
            return graph

        train_graph(
            self.task,
            self.topology,
            num_steps,
            self.path(num_passes),
            rewrite=rewrite,
            run="graph" if num_passes is None else f"after {num_passes} passes",
            operators=operators,
        )

    def culprit(self, bad: int, step: int) -> str:
        """Says which pass, and what it changed, for people."""
        if bad == 0:
            return "the captured step differs before any pass has changed it"
        for num in (bad - 1, bad):
            if num not in self.graphs or not self.path(num).exists():
                self.first_difference(step + 1, num, operators=[step])
        between = locate_runs(read_run(self.path(bad - 1)), read_run(self.path(bad))).difference
        lines = [f"pass {self.passes[bad - 1]!r} caused it: before it the step has eager's bits"]
        if between is not None:
            lines.append(f"  against the graph before it: {between}")
        lines += _rewrite(self.graphs[bad - 1], self.graphs[bad], between)
        return "\n".join(lines)

    def operator_script(self, difference: Difference) -> str:
        """Returns a script that calls the operator again, if that shows the difference, and writes what it reads."""
        a, b, step = difference.a, difference.b, difference.step
        if difference.kind != "result" or a is None or b is None or a.is_collective:
            return ""
        self.train_eager(step + 1, {step: [a.position]})
        self.train_graph(step + 1, None, {step: [b.position]})
        for letter, run, operator in (("a", "eager", a), ("b", "graph", b)):
            file = operator_file(self.folder / f"{run}.jsonl", difference.rank).with_suffix(".pt")
            saved = torch.load(file, weights_only=True)
            torch.save(saved[operator.position], self.folder / f"reproduce-{letter}.pt")
        own = any(each.operator.startswith("graphpasses.") for each in (a, b))
        imports, note = ("import graphpasses.ops  # noqa: F401\n", " and graphpasses") if own else ("", "")
        return _OPERATOR.format(difference=difference, imports=imports, imports_note=note)


def _rewrite(before: CapturedStep, after: CapturedStep, difference: Difference | None) -> list[str]:
    """Returns what changed between two graphs that reaches the node at which they part, in the order of the graph."""
    old = {line.node.name: line for line in read_lines(before)}
    new = {line.node.name: line for line in read_lines(after)}
    changed = {name for name, line in new.items() if name not in old or old[name].text != line.text}
    node = None if difference is None or difference.operator is None else difference.operator.node
    feeding = changed
    if node in new:  # what it is computed from, as far as only changed nodes lie between
        found = reach([new[node].node], lambda each: [n for n in each.all_input_nodes if n.name in changed])
        feeding = changed & {each.name for each in found}
    lines = [f"  - {line.text}" for name, line in old.items() if name not in new or name in feeding]
    lines += [f"  + {line.text}" for name, line in new.items() if name in feeding]
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], f"  and {len(lines) - _MAX_LINES} more lines"]
    return ["  its rewrite:", *lines] if lines else []


_OPERATOR = '''"""{difference}

Calls the operator again on what it read in both runs. Needs torch{imports_note} and the two files beside this one.
"""

from pathlib import Path

import torch
{imports}
HERE = Path(__file__).parent


def same_bits(a, b):
    if not isinstance(a, torch.Tensor):
        return all(map(same_bits, a, b))
    a, b = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(a, b)


def call(name):
    saved = torch.load(HERE / name, weights_only=True)
    namespace, operator, overload = saved["operator"].split(".")
    if saved["random_state"] is not None:
        of_device = saved["random_device"] != "cpu"
        (torch.cuda if of_device else torch).set_rng_state(saved["random_state"])
    function = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    print(saved["operator"], [each for each in saved["args"] if not isinstance(each, torch.Tensor)], saved["kwargs"])
    result = function(*saved["args"], **saved["kwargs"])
    print("  computes what the run computed:", same_bits(result, saved["results"]))
    return result


a, b = call("reproduce-a.pt"), call("reproduce-b.pt")
print("both runs' operators compute the same bits:", same_bits(a, b))
'''

_STEP = '''"""{difference}

Trains {num_steps} step(s) eagerly and as a graph with the first {num_passes} pass(es), on a simulated cluster.
"""

from pathlib import Path

from graphpasses import Pipeline, compare_runs, read_run
from graphpasses.parity.training import load_task, train_eager, train_graph
from graphpasses.simulate import Hardware, Topology, TuningLog  # noqa: F401

HERE = Path(__file__).parent
task = load_task({source!r})
topology = {topology!r}
PASSES = {num_passes}


def rewrite(captured, plan, layout):
    passes = task.pipeline(plan, layout).at(captured.stage).passes
    return Pipeline(passes[:PASSES]).run(captured, prove=False)


train_eager(task, topology, {num_steps}, HERE / "reproduce-a.jsonl")
train_graph(task, topology, {num_steps}, HERE / "reproduce-b.jsonl", rewrite=rewrite)
comparison = compare_runs(*(read_run(HERE / f"reproduce-{{name}}.jsonl") for name in "ab"))
print(comparison.verdict, comparison.divergence)
'''


def _step_script(difference: Difference, source: str, topology: Topology, step: int, num_passes: int) -> str:
    """Returns a script that trains a task both ways up to the step that differs, with as few passes as differ."""
    path = Path(source)
    return _STEP.format(
        difference=difference,
        source=str(path.resolve()) if path.suffix == ".py" else source,
        topology=topology,
        num_steps=step + 1,
        num_passes=num_passes,
    )
