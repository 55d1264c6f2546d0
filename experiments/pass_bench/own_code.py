"""What our own fx code buys: the passes' CPU time with torch's in its place, part by part.

Command line: ``python -m experiments.pass_bench.own_code --help``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import tyro
from rich.table import Table
from torch import fx

from experiments.pass_bench.full_size import NUM_RANKS, capture_llama3, shard_simply
from graphpasses._torch import fx_graphs
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.commands.train_torchtitan_on_cpu import use_cpu
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import known_values, nodes
from graphpasses.passes import default_pipeline
from graphpasses.terminal import make_console


def _under_mode(mode: Any, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with mode:
        return target(*args, **kwargs)


def _all_calls(_: object, graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and "val" in node.meta]


# By part: what torch's, or nothing, takes the place of.
PARTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "code (fx_graphs.quick_code): Graph.python_code": (fx_graphs, "quick_code", lambda *_: None),
    "fake values (fake_calls.fake_call): FakeTensorMode": (nodes, "fake_call", _under_mode),
    "calls as they were (known_values): all computed at each check": (
        known_values.KnownValues,
        "unknown",
        _all_calls,
    ),
}


def main(flavor: str = "8B", rounds: int = 3) -> None:
    """Times the default pipeline and the code of its step on a full-size Llama 3, with and without each part.

    Args:
        flavor: of torchtitan's Llama 3.
        rounds: how often each is timed, in turns; the fastest counts.
    """
    use_cpu("gloo")
    seconds: dict[str, list[float]] = {name: [] for name in ("all of it", *PARTS)}
    with fake_process_group(NUM_RANKS):
        captured = capture_llama3(flavor, shard_simply)
        pipeline = default_pipeline(BucketPlan.per_block(captured.model))
        for _ in range(rounds):
            for name, found in seconds.items():
                with mock.patch.object(*PARTS[name]) if name in PARTS else nullcontext():
                    start = time.process_time()
                    fx_graphs.generate_code(pipeline.run(captured, prove=False).module)
                    found.append(time.process_time() - start)
    table = Table("our own code, and what takes its place", "CPU seconds", "buys")
    whole = min(seconds["all of it"])
    for name, found in seconds.items():
        table.add_row(name, f"{min(found):.2f}", f"{min(found) / whole - 1:.0%}")
    make_console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
