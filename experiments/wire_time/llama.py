"""Time on the wire of a step of Llama 3 on paper: ``python -m experiments.wire_time.llama --help``."""

from __future__ import annotations

from pathlib import Path

import tyro

from experiments.pass_bench.full_size import NUM_RANKS, capture_llama3, shard_fully, shard_simply
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.commands.layout import print_scale
from graphpasses.commands.train_torchtitan_on_cpu import use_cpu
from graphpasses.fsdp.layout import eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.html_report.scale import scale_tables
from graphpasses.parity.run_file import Run, RunHeader
from graphpasses.passes import default_pipeline
from graphpasses.scale import Speeds, read_speeds


def main(flavor: str = "8B", tokens: int = 8192, speeds: Path | None = None) -> None:
    """Prints what ``graphpasses layout show --scale`` prints of a run, of a step that is captured and never run.

    Args:
        flavor: of torchtitan's Llama 3.
        tokens: of a rank's batch.
        speeds: file of latencies and bandwidths.
    """
    known = Speeds(tokens=tokens) if speeds is None else read_speeds(speeds)
    use_cpu("gloo")
    with fake_process_group(NUM_RANKS):
        layout = eager_layout(capture_llama3(flavor, shard_fully, tokens).model)
        step = capture_llama3(flavor, shard_simply, tokens)
        report = default_pipeline(BucketPlan.per_block(step.model)).run(step, graph_diff=True, prove=False).report
    assert report is not None
    header = RunHeader("", NUM_RANKS, layouts=layout)
    print_scale(scale_tables(Run(Path(), header, (), True, {"step": report}), known), known)


if __name__ == "__main__":
    tyro.cli(main)
