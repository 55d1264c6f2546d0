"""Hugging Face's ``Trainer`` under FSDP2 with captured steps, against the same trainer without: two ranks.

accelerate shards on accelerators alone; what keeps it from a CPU is replaced here.
"""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from graphpasses.integrations import by_shape
from graphpasses.parity.hashing import weight_hash
from graphpasses.parity.launch import run_ranks

pytest.importorskip("accelerate")

CASES: dict[str, dict[str, Any]] = {
    "bf16, evaluated": {"bf16": True, "eval_strategy": "steps", "eval_steps": 1},
    "fp32, accumulated, recomputed, smoothed": {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "label_smoothing_factor": 0.1,
    },
}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Cut:
    """Collates a rank's batches to one length after the other."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __call__(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        length = self._lengths.pop(0)
        return {name: torch.stack([item[name][:length] for item in items]) for name in items[0]}


def train(
    kind: str, folder: Path, lengths: list[int] | None = None, resume: str | None = None, **options: Any
) -> tuple[Any, ...]:
    """Trains with a trainer of a kind; returns what it logs, the hash of the weights, and how often it captured."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from graphpasses.integrations.transformers import Trainer as CapturedTrainer

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
            "state_dict_type": "SHARDED_STATE_DICT",  # safetensors cannot write what a CPU's full_tensor gives
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
        **{"max_steps": 3, "save_strategy": "no", **options},
    )
    trainer = {"eager": Trainer, "captured": CapturedTrainer}[kind](
        model=model,
        args=arguments,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        data_collator=Cut(lengths) if lengths else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    assert type(trainer.model).__name__ == "FSDPLlamaForCausalLM"
    logs = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
    return logs, weight_hash(trainer.model), len(vars(trainer).get("captured_steps", ()))


def on_a_cpu() -> None:
    """Lets accelerate shard a model on a CPU."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin, set_device = AcceleratorState.__init__, PartialState.set_device

    def sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    def cpu(self: Any) -> None:
        set_device(self)
        self.device = torch.device("cpu")  # not cpu:0, on which no tensor is

    mock.patch.object(AcceleratorState, "__init__", sharded).start()
    mock.patch.object(PartialState, "set_device", cpu).start()
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost")
    os.environ.update(MASTER_PORT="0", FSDP_VERSION="2", FSDP_RESHARD_AFTER_FORWARD="true")
    os.environ.update(ACCELERATE_USE_FSDP="true", TOKENIZERS_PARALLELISM="false")


def train_all(folder: Path) -> dict[str, Any]:
    """Runs on every rank."""
    gc.freeze()  # accelerate lets the collector look at all objects, several times for each trainer
    on_a_cpu()
    found: dict[str, Any] = {
        name: (train("eager", folder, **options), train("captured", folder, **options))
        for name, options in CASES.items()
    }
    found["other rate"] = train("eager", folder, bf16=True, learning_rate=1e-3)
    saved = folder / "saved"
    train("captured", saved, max_steps=2, save_strategy="steps", save_steps=1, lr_scheduler_type="constant")
    checkpoint = str(saved / "checkpoint-1")
    found["resumed"] = [
        train(kind, folder, resume=checkpoint, lr_scheduler_type="constant") for kind in ("eager", "captured")
    ]
    found["straight"] = train("eager", folder, lr_scheduler_type="constant")
    lengths = [[8, 10, 8, 8, 8], [8, 8, 10, 8, 8]][dist.get_rank()]
    found["lengths"] = [train(kind, folder, [*lengths], max_steps=4) for kind in ("eager", "captured")]
    try:
        with mock.patch.object(by_shape, "MAX_SHAPES", 1):
            train("captured", folder, [*range(2, 8)], max_steps=4)
    except Exception as error:
        found["many lengths"] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ranks = run_ranks(train_all, 2, tmp_path_factory.mktemp("trainer"))
    assert ranks[0] == ranks[1]
    return ranks[0]  # type: ignore[no-any-return]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_weights_are_eagers(name: str, trained: dict[str, Any]) -> None:
    eager, captured = trained[name]
    assert captured == (*eager[:2], 1)
    assert len(eager[0]) == 3


@pytest.mark.multiprocess
def test_another_learning_rate_shows(trained: dict[str, Any]) -> None:
    assert trained["other rate"][1] != trained["bf16, evaluated"][1][1]


@pytest.mark.multiprocess
def test_checkpoints_of_captured_steps(trained: dict[str, Any]) -> None:
    eager, captured = trained["resumed"]
    assert captured[:2] == eager[:2]
    assert eager[1] == trained["straight"][1]


@pytest.mark.multiprocess
def test_many_shapes_are_refused(trained: dict[str, Any]) -> None:
    assert re.match("CaptureError: the inputs of the trainer have had 1 shapes", trained["many lengths"])
    assert by_shape.MAX_SHAPES == 8


def of_ones_own(folder: Path, change: str, *, is_captured: bool) -> tuple[int, str]:
    """Trains with a trainer whose ``compute_loss`` reads an attribute, which it, or a callback, changes; returns how
    many tokens it has counted, and the hash of the weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from graphpasses.integrations.transformers import Trainer as CapturedTrainer

    class Mine(CapturedTrainer if is_captured else Trainer):  # type: ignore[misc]
        scale, num_tokens = 1.0, 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if change == "in the loss":
                self.num_tokens += inputs["input_ids"].numel()
            return self.scale * super().compute_loss(model, inputs, *args, **kwargs)

    class Anneal(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if change == "by a callback":
                trainer.scale /= 2

    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    options: dict[str, Any] = {"max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    arguments = TrainingArguments(output_dir=str(folder), disable_tqdm=True, **options)
    trainer = Mine(model=model, args=arguments, train_dataset=Tokens(), callbacks=[Anneal()])
    trainer.train()
    return trainer.num_tokens, weight_hash(model)


@pytest.mark.slow
def test_what_a_trainer_changes(tmp_path: Path) -> None:
    found = {}
    for change, num_tokens in {"by a callback": 0, "in the loss": 256, "nothing": 0}.items():
        found[change] = of_ones_own(tmp_path, change, is_captured=True)
        assert found[change] == of_ones_own(tmp_path, change, is_captured=False)
        assert found[change][0] == num_tokens
    assert found["by a callback"][1] != found["nothing"][1]


@pytest.mark.slow
def test_router_logits_are_recorded_by_hooks(tmp_path: Path) -> None:
    """transformers 5 installs them in the first forward; its experts are multiplied in float32."""
    pytest.importorskip("transformers.utils.output_capturing")
    from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

    from graphpasses.integrations.transformers import Trainer as CapturedTrainer

    def losses(trainer_class: Any) -> list[float]:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True))
        options: dict[str, Any] = {"max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no"}
        arguments = TrainingArguments(output_dir=str(tmp_path), logging_steps=1, disable_tqdm=True, **options)
        trainer = trainer_class(model=model, args=arguments, train_dataset=Tokens())
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    eager = losses(Trainer)
    assert losses(CapturedTrainer) == eager
    assert len(set(eager)) == 2


@pytest.mark.multiprocess
def test_ranks_whose_shapes_differ(trained: dict[str, Any]) -> None:
    eager, captured = trained["lengths"]
    assert captured == (*eager[:2], 3)
