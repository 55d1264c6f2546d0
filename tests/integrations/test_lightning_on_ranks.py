"""PyTorch Lightning's ``ModelParallelStrategy`` with captured steps, against the same strategy without: two ranks."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from graphpasses.parity.hashing import weight_hash
from graphpasses.parity.launch import run_ranks

pytest.importorskip("lightning")

CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "logs more": {"how": "logs and returns more"},
    "reads the epoch": {"how": "reads the epoch"},
    "accumulated by three, clipped": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
}

REFUSED = {
    "reads batch_idx": "training_step reads its batch_idx",
    "logs a metric": "training_step logs 'metric', a MeanMetric",
    "optimizes by itself": "the module optimizes by itself",
    "has a backward of its own": "the module has a backward of its own",
    "scales in a hook": "a hook scales the loss",
}


def make_model(how: str) -> Any:
    """Returns a module that is sharded by its ``configure_model`` and does what a case says."""
    import torchmetrics
    from lightning.pytorch import LightningModule

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
            self.metric = torchmetrics.MeanMetric() if how == "logs a metric" else None
            self.automatic_optimization = how != "optimizes by itself"

        def configure_model(self) -> None:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
            for module in (self.layers[0], self.layers[2], self.layers):
                fully_shard(module, mesh=self.device_mesh["data_parallel"], mp_policy=policy)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            x, labels = batch
            scores = self.layers(x)
            loss = nn.functional.cross_entropy(scores, labels)
            if (how == "reads the epoch" and self.current_epoch) or (how == "reads batch_idx" and batch_idx % 2):
                loss = 2 * loss
            if how == "logs a metric":
                self.log("metric", self.metric)
            if how == "logs and returns more":
                accuracy = (scores.argmax(-1) == labels).float().mean()
                self.log_dict({"accuracy": accuracy, "largest": scores.max().item(), "two": 2.0}, on_epoch=True)
                self.log("weighted", loss, on_epoch=True, batch_size=1 + labels.sum().item())
            self.log("loss", loss)
            self.log("mean loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
            return {"loss": loss, "scores": scores} if how == "logs and returns more" else loss

        def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
            self.log(
                "validation loss",
                nn.functional.cross_entropy(self.layers(batch[0]), batch[1]),
                sync_dist=True,
            )

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    if how == "has a backward of its own":
        Model.backward = lambda self, loss: (2 * loss).backward()  # type: ignore[method-assign]
    if how == "scales in a hook":
        Model.on_before_backward = lambda self, loss: loss.register_hook(lambda seed: 2 * seed)  # type: ignore[method-assign]
    return Model()


def train(
    kind: str,
    folder: Path,
    how: str = "",
    resume: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Trains with a strategy of a kind; returns its logs, the hash of the weights, and how often it captured."""
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from graphpasses.integrations.lightning import ModelParallelStrategy as CapturedStrategy

    logs: list[Any] = []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
            results = {name: value.tolist() for name, value in outputs.items()}
            logs.append((results, metrics, trainer.optimizers[0].param_groups[0]["lr"]))

        def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
            norms = [parameter.grad.full_tensor().norm().item() for parameter in module.parameters()]
            logs.append(norms)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 8, generator=generator), torch.randint(4, (40,), generator=generator))
    strategy_class = {"eager": ModelParallelStrategy, "captured": CapturedStrategy}[kind]
    strategy = strategy_class(data_parallel_size=2, tensor_parallel_size=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=folder,
        callbacks=[Record()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"max_epochs": 2, **options},
    )
    model = make_model(how)
    batches = DataLoader(data, batch_size=4)
    trainer.fit(model, batches, batches, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    steps = vars(strategy).get("captured_steps", {})
    return logs, weight_hash(model), sum(map(len, steps.values()))


def message_of(function: Callable[..., object], *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_all(folder: Path) -> dict[str, Any]:
    """Runs on every rank."""
    warnings.simplefilter("ignore")  # Lightning warns of few workers, and of torch's own changes
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test")
    found: dict[str, Any] = {
        name: [train(kind, folder, **options) for kind in ("eager", "captured")] for name, options in CASES.items()
    }
    found["not clipped"] = train("eager", folder, accumulate_grad_batches=3)
    saved = folder / "saved"
    train("captured", folder, save=saved, max_epochs=1)
    found["resumed"] = [train(kind, folder, resume=saved) for kind in ("eager", "captured")]
    found["refused"] = {how: message_of(train, "captured", folder, how) for how in REFUSED}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ranks = run_ranks(train_all, 2, tmp_path_factory.mktemp("lightning"))
    assert [each["refused"] for each in ranks] == [ranks[0]["refused"]] * 2
    return ranks[0]  # type: ignore[no-any-return]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_losses_norms_weights_and_logs_are_eagers(name: str, trained: dict[str, Any]) -> None:
    eager, captured = trained[name]
    assert captured == (*eager[:2], 1)
    assert len(eager[0]) == 10 + (4 if "accumulated" in name else 10)


@pytest.mark.multiprocess
def test_gradients_that_are_not_clipped_show(trained: dict[str, Any]) -> None:
    assert trained["not clipped"][1] != trained["accumulated by three, clipped"][1][1]


@pytest.mark.multiprocess
def test_checkpoints_of_captured_steps(trained: dict[str, Any]) -> None:
    eager, captured = trained["resumed"]
    assert captured[:2] == eager[:2]
    assert eager[1] == trained["bf16"][0][1]


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", REFUSED)
def test_what_a_module_must_not_do(how: str, trained: dict[str, Any]) -> None:
    assert re.match(f"CaptureError: {REFUSED[how]}", trained["refused"][how])
