"""What a step does beside its graphs, which a proof takes to be what it was: what reads its inputs, checks and leaves
what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch import fx

from graphpasses._torch.fx_graphs import runs_as_written
from graphpasses.graph import CapturedStep, DynamoGraph, TrainGraph

# What a proof compares itself; and what decides no bits: what is said, kept, measured or remembered of a step.
_COMPARED = frozenset({"inputs", "live", "module", "outputs", "runs_as", "stage", "told", "update"})
_DECIDES_NOTHING = frozenset({
    "check_every", "checker", "copied_constants", "fixed_signature", "notes", "place", "recapture", "remembered",
    "report", "rewrites", "seconds", "timelines",
})  # fmt: skip
# What each call asks first, which may become more.
_GROWS = frozenset({"backward_checks", "checks", "input_checks", "written"})
_OF_UPDATES = ("clip_norm", "model", "optimizers", "replaced")


def what_is_another(before: TrainGraph, after: TrainGraph) -> str:
    """Returns what of a step that runs is another than in the step that it was made from; empty if nothing is."""
    if type(before) is not type(after):
        return "class"
    if not isinstance(before, (CapturedStep, DynamoGraph)):  # which another runner runs
        return ""
    return next((name for name, one, two in _pairs(before, after) if not (one is two or one == two)), "")


def _pairs(before: TrainGraph, after: TrainGraph) -> Iterator[tuple[str, Any, Any]]:
    for each in fields(before):
        if each.init and each.name not in _COMPARED | _DECIDES_NOTHING:
            one, two = getattr(before, each.name), getattr(after, each.name)
            yield each.name, one, _as_much(one, two) if each.name in _GROWS else two
    if before.update is not None and after.update is not None:
        for name in _OF_UPDATES:
            yield f"update.{name}", getattr(before.update, name), getattr(after.update, name)
    known = [each.graph for each in _modules(before)]
    for name, module in zip(("module", "update.module"), _modules(after), strict=False):
        yield f"{name}, which has hooks or code of its own,", True, module.graph in known or runs_as_written(module)


def _modules(graph: TrainGraph) -> list[fx.GraphModule]:
    return [graph.module, *([] if graph.update is None else [graph.update.module])]


def _as_much(one: Any, two: Any) -> Any:
    """Returns of what may have become more as much as it was."""
    return one & two if isinstance(one, frozenset) else two[: len(one)]
