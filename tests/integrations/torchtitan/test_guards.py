"""What changes after graph_trainer traced its step is refused: the graph would go on as if it had not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from experiments.graph_trainer_parity.ranks import as_torchrun, stores
from graphpasses.commands.train_torchtitan_on_cpu import make_assets
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.integrations.torchtitan.cpu_configs import Recipe
from graphpasses.parity.launch import run_ranks

SCALE = 1.0


class ScaledLoss:
    """A user's loss, with an attribute and a global that it reads."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss, self.weight = loss, 1.0

    def __call__(self, pred: Any, labels: Any, global_valid_tokens: Any) -> Any:
        loss, metrics = self.loss(pred, labels, global_valid_tokens)
        return loss * self.weight * SCALE, metrics


def train_and_change(folder: Path, ports: Sequence[int]) -> dict[str, str]:
    """Changes one thing after the other, and undoes it; returns what the next step says to each."""
    found: dict[str, str] = {}
    with as_torchrun(folder, ports) as begin:
        from graphpasses.integrations.torchtitan.cpu_configs import trainer_config
        from graphpasses.integrations.torchtitan.pass_pipeline import PIPELINE

        begin()
        trainer: Any = trainer_config(Recipe("llama3", layers=(0,)), folder, 9, PIPELINE).build()
        loss = trainer.loss_fn = ScaledLoss(trainer.loss_fn)
        model = trainer.model_parts[0]
        batches = trainer.batch_generator(trainer.dataloader)

        def step(what: str, given: Iterator[Any] = batches) -> None:
            try:
                trainer.train_step(given)
                found[what] = ""
            except (CaptureError, BatchMismatchError) as error:
                found[what] = str(error)

        def change(what: str, owner: Any, name: str, value: object) -> None:
            before = getattr(owner, name)
            setattr(owner, name, value)
            step(what)
            setattr(owner, name, before)

        step("nothing")
        change("attribute", model.norm, "eps", 0.5)
        change("loss", loss, "weight", 2.0)
        change("other loss", trainer, "loss_fn", lambda *given, **named: (loss(*given, **named)[0] * 2, {}))
        change("frozen", dict(model.named_parameters())["norm.weight"], "requires_grad", False)
        globals()["SCALE"] = 2.0
        step("global")
        globals()["SCALE"] = 1.0
        torch.use_deterministic_algorithms(False)
        step("setting")
        torch.use_deterministic_algorithms(True)
        handle = model.norm.register_forward_hook(lambda module, given, result: 2 * result)
        step("hook")
        handle.remove()
        given, labels = next(batches)
        step("batch", iter([({name: each[:, :32] for name, each in given.items()}, labels[:, :32])]))
        step("nothing again")
        trainer.close()
        dist.destroy_process_group()
    return found


@pytest.mark.multiprocess
def test_changes_after_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    make_assets(tmp_path)
    with stores(1) as ports:
        (found,) = run_ranks(train_and_change, 1, tmp_path, ports)
    again = "capture the step again, or undo the change"
    was = "when the step was captured, and is"
    given = "give it in the batch, as a tensor, or capture the step again"
    assert found.pop("hook").startswith(f"'norm.hooks' was () {was} (")
    assert found == {
        "nothing": "",
        "attribute": f"'norm.eps' was 1e-05 {was} 0.5 now; {again}",
        "loss": f"'ScaledLoss.weight' was 1.0 {was} 2.0 now; {given}",
        "other loss": "the trainer's loss_fn was replaced since graph_trainer traced its step, which goes on with "
        "the one before; put that back, or make a new trainer",
        "frozen": "parameter 'norm.weight' had requires_grad=True when the step was captured, and has False now; "
        + again,
        "global": f"'SCALE' was 1.0 {was} 2.0 now; {given}",
        "setting": f"torch.are_deterministic_algorithms_enabled() was True {was} False now; {again}",
        "batch": "inputs differs from the captured batch: expected shape [1, 64], torch.int64, on cpu, got shape "
        "[1, 32], torch.int64, on cpu. Capture a step for it, pad the batch, or name the dims that vary in "
        "capture_train_step's dynamic_shapes",
        "nothing again": "",
    }


def test_a_trainer_whose_context_was_replaced_is_refused() -> None:
    pytest.importorskip("torchtitan")
    from types import SimpleNamespace

    from graphpasses.errors import UnsupportedError
    from graphpasses.integrations.torchtitan.guards import TraceWatch

    trainer = SimpleNamespace(train_context=lambda: None, model_parts=[], loss_fn=None)
    watch = TraceWatch(trainer)
    assert TraceWatch.of(trainer) is watch
    trainer.train_context = lambda: None
    with pytest.raises(UnsupportedError) as caught:
        TraceWatch.of(trainer)
    assert str(caught.value) == (
        "SimpleNamespace.train_context was replaced after the trainer was made, and nobody saw what the step reads "
        "while it was traced; set it before GraphTrainer.__init__ ends, or leave it"
    )
