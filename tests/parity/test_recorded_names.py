"""Under which names runs record weights, gradients, optimizer states and bucket layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from graphpasses._torch.pytree import tree_leaves
from graphpasses.fsdp.layout import BucketLayout, Layout, LayoutEntry
from graphpasses.parity import ParityRecorder, compare_runs, gradient_hashes, read_run, weight_hashes


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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_the_optimizers_state_alone(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    """Both runs end with the same weights, and would go on with others."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = kind(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    runs = [tmp_path / name for name in ("a", "b", "c", "without")]
    for run in runs:
        if run.name == "c":
            next(value for value in tree_leaves(dict(optimizer.state)) if isinstance(value, torch.Tensor)).add_(1)
        with ParityRecorder(run) as recorder:
            recorder.record(0, None, model, optimizer=None if run.name == "without" else optimizer)
    a, b, c, without = map(read_run, runs)
    assert compare_runs(a, b).equal
    divergence = compare_runs(a, c).divergence
    assert divergence is not None
    assert [name.partition("'")[0] for name in divergence.weights] == ["optimizer"]
    assert compare_runs(a, without).verdict == "not compared"


def test_several_optimizers_and_parameters_that_the_model_has_not(tmp_path: Path) -> None:
    """Of master copies in float32, which differ where the model's weights are equal."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    masters = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    optimizers = torch.optim.SGD(model.parameters()), torch.optim.AdamW(masters)
    for each in masters:
        each.grad = torch.ones_like(each)
    optimizers[1].step()
    for name, changed in (("a", None), ("b", masters[1]), ("c", optimizers[1].state[masters[1]]["exp_avg"])):
        with ParityRecorder(tmp_path / name) as recorder, torch.no_grad():
            if changed is not None:
                changed.add_(1e-6)
            recorder.record(0, None, model, optimizer=optimizers)
            if changed is not None:
                changed.sub_(1e-6)
    a, *others = (read_run(tmp_path / name) for name in "abc")
    found = [compare_runs(a, each).divergence for each in others]
    assert [each and each.weights for each in found] == [
        ("optimizer's parameter 1 of group 1",),
        ("optimizer's exp_avg of parameter 1 of group 1",),
    ]
