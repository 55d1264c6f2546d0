"""The types that transformers registers: what makes them small, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.architectures.registry import __main__ as command
from experiments.architectures.registry.outcomes import Outcome, read, table, write
from experiments.architectures.registry.shrink import small_config
from experiments.architectures.registry.types import registered


def test_every_type_is_a_case() -> None:
    names = [each.name for each in registered()]
    assert len(set(names)) == len(names) > 100


def test_sizes_are_small_and_every_kind_of_layer_stays() -> None:
    from transformers import Qwen3NextConfig

    config = small_config(Qwen3NextConfig)
    assert (config.hidden_size, config.vocab_size, config.num_experts, config.use_cache) == (
        64,
        203,
        4,
        False,
    )
    assert config.layer_types == ["linear_attention", "linear_attention", "full_attention"]
    assert config.num_hidden_layers == 3


def test_parts_are_small_too() -> None:
    from transformers import Gemma3Config

    config = small_config(Gemma3Config)
    assert config.text_config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (config.text_config.hidden_size, config.vision_config.hidden_size) == (64, 64)
    assert config.vision_config.num_hidden_layers == 2


@pytest.mark.parametrize("name", ["bloom", "gpt2", "mixtral", "opt"])
def test_a_type_has_a_loss(name: str) -> None:
    (architecture,) = (each for each in registered() if each.name == name)
    model = architecture.build()
    assert sum(each.numel() for each in model.parameters()) < 500_000
    batch = architecture.inputs(torch.Generator().manual_seed(0))
    assert model(**batch).loss.isfinite()


@pytest.mark.multiprocess
def test_what_is_known_is_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(steps=1, out=tmp_path, only="gpt_neox_japanese", workers=1) == 0
    first = (tmp_path / "outcomes.jsonl").read_text()
    assert capsys.readouterr().out.count("gpt_neox_japanese, ") == 2
    assert command.main(steps=1, out=tmp_path, only="gpt_neox_japanese", workers=1) == 0
    assert (tmp_path / "outcomes.jsonl").read_text() == first
    assert command.main(only="no such type") == 2


def test_the_table_counts_and_names_reasons(tmp_path: Path) -> None:
    found = [
        Outcome("llama", "bf16", "equal"),
        Outcome("blt", "bf16", "refused", "loss_fn decides"),
        Outcome("dbrx", "bf16", "refused", "loss_fn decides"),
    ]
    write(found, tmp_path / "outcomes.jsonl")
    assert read(tmp_path / "outcomes.jsonl") == found
    lines = table(found).splitlines()
    assert "| equal | 1 |" in lines
    assert "| refused | 2 |" in lines
    assert lines[-1] == "| refused | blt, dbrx | `loss_fn decides` |"
