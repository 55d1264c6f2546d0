"""Under which names runs record weights, gradients and bucket layouts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from graphpasses.fsdp.layout import BucketLayout, Layout, LayoutEntry
from graphpasses.parity import ParityRecorder, gradient_hashes, read_run, weight_hashes


def test_no_tensor_is_lost_where_a_wrapper_has_one_of_the_same_name() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    model._orig_mod = nn.Linear(2, 2)
    assert list(weight_hashes(model)) == ["weight", "_orig_mod.weight", "bias"]
    assert list(gradient_hashes(model)) == ["weight", "_orig_mod.weight", "bias"]


def test_names_are_those_of_checkpoints(tmp_path: Path) -> None:
    """What torch wraps for activation checkpointing is recorded as if it did not."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    entry = LayoutEntry("0._checkpoint_wrapped_module.weight", 4, 2, 0)
    layout = Layout((BucketLayout("reduce_scatter", (0, 1), "avg", "bfloat16", (entry,)),))
    with ParityRecorder(tmp_path / "run.jsonl", layouts=layout) as recorder:
        recorder.record(0, torch.tensor(1.0), model)
    run = read_run(tmp_path / "run.jsonl")
    assert list(run.steps[0].weights) == list(run.steps[0].gradients) == ["0.weight", "0.bias"]
    assert run.header.layouts is not None
    assert [each.fqn for bucket in run.header.layouts.buckets for each in bucket.entries] == ["0.weight"]
