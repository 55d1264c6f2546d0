"""torchtitan's debug configurations, small enough for a CPU."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.experiments.graph_trainer.common_utils import build_decoder_config_for_backend
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig, to_graph_trainer_config
from torchtitan.models.common import Linear

from experiments.graph_trainer_parity.cases import Recipe

__all__ = ["trainer_config"]

SEED = 42
_CONFIGS = {"llama3": "llama3_configs", "qwen3": "qwen3_configs", "deepseek_v3": "deepseekv3_configs"}


def trainer_config(recipe: Recipe, folder: Path, num_steps: int, pipeline: str | None) -> Any:
    """Returns the configuration of a trainer.

    Args:
        recipe: what is trained.
        folder: has ``tests/assets``, and gets what torchtitan writes.
        num_steps: optimizer steps.
        pipeline: of graph_trainer's passes; None for torchtitan's eager trainer.
    """
    models = importlib.import_module(f"torchtitan.models.{recipe.model}")
    registry = importlib.import_module(f"torchtitan.models.{recipe.model}.config_registry")
    config = getattr(registry, f"{recipe.model}_debugmodel")()
    decoder = build_decoder_config_for_backend(
        getattr(models, _CONFIGS[recipe.model])[recipe.flavor], "sdpa", **_options(recipe)
    )
    decoder.layers = decoder.layers[: recipe.num_layers]
    decoder.enable_weight_tying = recipe.tied
    if recipe.tied:
        decoder.tok_embeddings.param_init = models._EMBEDDING_SKIP_INIT
    if recipe.biased:
        for layer in decoder.layers:
            _add_biases(layer)
    config.model_spec = replace(models.model_registry(recipe.flavor), model=decoder)
    if not recipe.chunked_loss and isinstance(config.loss, ChunkedLossWrapper.Config):
        config.loss = config.loss.loss_fn
    config.hf_assets_path = str(folder / "tests" / "assets" / "tokenizer")
    config.dataloader.dataset_path = str(folder / "tests" / "assets" / "c4_test")
    config.dump_folder = str(folder / "out")
    config.training.mixed_precision_reduce = recipe.reduce_dtype
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 64, 1, num_steps
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.data_parallel_replicate_degree = recipe.num_replicas
    config.parallelism.tensor_parallel_degree = recipe.tensor_parallel
    config.activation_checkpoint = None
    config.debug.seed, config.debug.deterministic = SEED, True
    if pipeline is None:
        return config
    graph_models = importlib.import_module(f"torchtitan.experiments.graph_trainer.{recipe.model}")
    config = to_graph_trainer_config(config, graph_models.model_registry)
    config.compile = GraphTrainerCompileConfig(enable=True, pass_pipeline=pipeline)
    return config


def _options(recipe: Recipe) -> dict[str, Any]:
    return {"moe_comm_backend": "standard"} if recipe.model == "deepseek_v3" or "moe" in recipe.flavor else {}


def _add_biases(config: Any) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Linear.Config):
            value.bias = True
        elif hasattr(value, "__dataclass_fields__"):
            _add_biases(value)
