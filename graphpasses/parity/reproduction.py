"""Scripts that show a difference again: of one operator, or of one step with as few passes as differ."""

from __future__ import annotations

from pathlib import Path

from graphpasses.parity.first_difference import Difference
from graphpasses.parity.operators import operator_file
from graphpasses.simulate.rings import Topology

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
        torch.set_rng_state(saved["random_state"])
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


def write_operator_script(folder: Path, difference: Difference) -> Path:
    """Writes a script that calls an operator on what it read in ``folder``'s eager.jsonl and graph.jsonl."""
    import torch

    assert difference.a is not None
    assert difference.b is not None
    for letter, run, operator in (("a", "eager", difference.a), ("b", "graph", difference.b)):
        file = operator_file(folder / f"{run}.jsonl", difference.rank).with_suffix(".pt")
        saved = torch.load(file, weights_only=True)
        torch.save(saved[operator.position], folder / f"reproduce-{letter}.pt")
    own = any(each.operator.startswith("graphpasses.") for each in (difference.a, difference.b))
    text = _OPERATOR.format(
        difference=difference,
        imports="import graphpasses.ops  # noqa: F401\n" if own else "",
        imports_note=" and graphpasses" if own else "",
    )
    return _written(folder, text)


def write_step_script(
    folder: Path, difference: Difference, source: str, topology: Topology, step: int, num_passes: int
) -> Path:
    """Writes a script that trains a task both ways up to the step that differs, with as few passes as differ."""
    path = Path(source)
    text = _STEP.format(
        difference=difference,
        source=str(path.resolve()) if path.suffix == ".py" else source,
        topology=topology,
        num_steps=step + 1,
        num_passes=num_passes,
    )
    return _written(folder, text)


def _written(folder: Path, text: str) -> Path:
    script = folder / "reproduce.py"
    script.write_text(text)
    return script
