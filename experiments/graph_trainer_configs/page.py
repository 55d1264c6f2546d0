"""The outcomes as a page."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.graph_trainer_configs.upstream import Configuration
from experiments.harness.outcome import Outcome, counted, messages_list, shown

__all__ = ["make_page"]

_HEAD = """# graph_trainer's own configurations

Every configuration that graph_trainer's integration tests and numerics tests train, read from the sources of
torchtitan 0.3.0, with `--compile.pass_pipeline graphpasses`. This page was written by

    python -m experiments.graph_trainer_configs --write docs/graph_trainer_configs.md

on a CPU with torch 2.13, and, where a row says so, with `--again --only NAME` and torch 2.14, which newer parts of
torchtitan need. The options are upstream's, but attention is SDPA, models have 3 layers and sequences 64 tokens,
process groups are `nccl_sim`, and CUDA graphs and checkpoints are off. With overlapped experts eager is torchtitan's
eager trainer whose modules run on the same chunks. With ZBVZeroBubble and DualPipeV the loss is computed as a whole
(in chunks torchtitan's eager trainer loses a gradient, and our pipeline refuses it), without activation checkpoints,
which eager cannot have there.

| | |
|---|---|
| bits | Losses, clipped gradients and weights of all ranks are eager's after each of 3 steps; each moves weights. |
| rounding | Not run: Inductor compiles the whole graph that our pipeline leaves; it warns that bits may be others. |
| refused | graphpasses refuses it by name; the message stands below. |
| upstream cannot | graph_trainer fails on a CPU with its own pipeline, too; its message stands below. |
| eager cannot | torchtitan's eager trainer fails on a CPU, too: there is nothing to compare with. |
"""


def make_page(outcomes: Mapping[Configuration, Outcome]) -> str:
    """Makes the table of all configurations, and a list of the messages.

    Args:
        outcomes: of each configuration.

    Returns:
        Markdown.
    """
    messages: dict[str, int] = {}
    lines = ["| test | ranks | upstream runs it | result |", "|---|---:|---|---|"]
    for each, outcome in outcomes.items():
        runs = "no" if each.is_disabled else "yes"
        lines.append(f"| `{each.name}` | {each.num_ranks} | {runs} | {shown(outcome, messages)} |")
    parts = [
        _HEAD,
        counted(outcomes.values(), "configurations"),
        "\n".join(lines),
        "## Messages",
        messages_list(messages),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"
