"""Recording a trainer's steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.errors import LayoutError, RunFileError
from graphpasses.parity import compare_runs, read_run, record_trainer
from graphpasses.parity.record_trainer import GRADIENT_NORM, recorded


class Trainer:
    """As much of torchtitan's trainer as is recorded: two microbatches a step, every other step is logged."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model_parts: list[nn.Module] = [nn.Linear(2, 1)]
        self.parallel_dims = SimpleNamespace(pp=1)
        self.config = SimpleNamespace(
            model_spec=SimpleNamespace(name="linear", flavor="debug"), debug=SimpleNamespace(seed=7)
        )
        self.metrics_processor = SimpleNamespace(log=lambda *args, **more: self.logged.append(args[3]))
        self.logged: list[float] = []
        self.step = 0

    def forward_backward_step(self, *, input_dict: torch.Tensor) -> torch.Tensor:
        loss = self.model_parts[0](input_dict).sum()
        loss.backward()
        return loss

    def train_step(self, batches: Any) -> None:
        self.step += 1
        self.model_parts[0].zero_grad()
        for batch in batches:
            self.forward_backward_step(input_dict=batch)
        with torch.no_grad():
            norm = nn.utils.get_total_norm([p.grad for p in self.model_parts[0].parameters()])
            for parameter in self.model_parts[0].parameters():
                parameter -= 0.1 * parameter.grad
        if self.step % 2:
            self.metrics_processor.log(self.step, 0.0, 0.0, norm.item(), extra_metrics={})


def train(path: Path, batch: torch.Tensor) -> Trainer:
    trainer = Trainer()
    with recorded(trainer, path, run="ours"):
        for _ in range(3):
            trainer.train_step([batch, 2 * batch])
    return trainer


def test_every_step_is_recorded(tmp_path: Path) -> None:
    trainer = train(tmp_path / "a.jsonl", torch.ones(3, 2))
    run = read_run(tmp_path / "a.jsonl")
    assert (run.header.run, run.header.model, run.header.seed) == ("ours", "linear debug", 7)
    assert [record.step for record in run.steps] == [1, 2, 3]
    assert [GRADIENT_NORM in record.gradients for record in run.steps] == [True, False, True]
    assert len(trainer.logged) == 2
    model = Trainer().model_parts[0]
    first = model(torch.ones(3, 2)).sum() + model(2 * torch.ones(3, 2)).sum()
    assert run.steps[0].loss is not None
    assert float(run.steps[0].loss.values[0]) == pytest.approx(first.item())

    train(tmp_path / "same.jsonl", torch.ones(3, 2))
    train(tmp_path / "other.jsonl", torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.5]]))
    same, other = (compare_runs(run, read_run(tmp_path / f"{name}.jsonl")) for name in ("same", "other"))
    assert same.equal
    assert other.divergence is not None
    assert GRADIENT_NORM in other.divergence.gradients


def test_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = Trainer()
    log = trainer.metrics_processor.log
    with pytest.raises(KeyError), recorded(trainer, tmp_path / "a.jsonl"):
        raise KeyError
    assert vars(trainer).keys() == vars(Trainer()).keys()
    assert trainer.metrics_processor.log is log
    assert not read_run(tmp_path / "a.jsonl").complete
    with pytest.raises(RunFileError, match="exists already"), recorded(trainer, tmp_path / "a.jsonl"):
        pass


def test_parts_of_a_model_are_recorded_under_their_names(tmp_path: Path) -> None:
    trainer = Trainer()
    first = nn.ModuleDict({"layers": nn.Sequential(trainer.model_parts[0])})
    trainer.model_parts.append(first)
    with recorded(trainer, tmp_path / "a.jsonl"):
        trainer.train_step([torch.ones(3, 2)])
    (step,) = read_run(tmp_path / "a.jsonl").steps
    assert list(step.weights) == ["layers.0.weight", "layers.0.bias", "weight", "bias"]
    assert step.gradients["layers.0.bias"] == step.gradients["bias"]
    assert step.weights["layers.0.weight"] != step.weights["bias"]


def test_layouts_that_cannot_be_told_do_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(model: nn.Module, config: Any) -> Any:
        raise LayoutError("several dtypes")

    monkeypatch.setattr(record_trainer, "read_groups", lambda model: [model])
    monkeypatch.setattr(record_trainer, "buckets_of", refuse)
    train(tmp_path / "a.jsonl", torch.ones(3, 2))
    assert caplog.messages == ["the bucket layouts of this run are not recorded: several dtypes"]
    run = read_run(tmp_path / "a.jsonl")
    assert run.header.layouts is None
    assert len(run.steps) == 3
