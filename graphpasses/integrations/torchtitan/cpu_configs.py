"""torchtitan's debug models as a CPU can train them, by its eager trainer and by graph_trainer.

For torchtitan's command line, whose ``--module`` takes this module: ``--config llama3_tied`` is its eager trainer,
FSDP2, and ``--config graph_llama3_tied`` graph_trainer with our pipeline. Attention is SDPA; FlexAttention has no
backward on a CPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Recipe:
    """What is trained: a model of torchtitan, changed as its own configurations allow."""

    model: Literal["llama3", "qwen3", "deepseek_v3"]  # its package
    flavor: str = "debugmodel"  # its configuration
    tied: bool = False  # whether lm_head has the embedding's weight
    biased: bool = False  # whether the layers' linear modules have biases
    chunked_loss: bool = False  # whether the loss is torchtitan's chunked one
    reduce_dtype: str = "float32"  # of gradients; torchtitan's own configurations know float32 only
    layers: tuple[int, ...] | None = None  # which of its layers are left; None is all
    num_experts: int | None = None  # how many experts its layers have; None is as many as they have
    # What is computed again in backward: by eager's checkpoints, by graph_trainer's memory policy.
    checkpointing: Literal["", "selective", "full"] = ""
    num_replicas: int = 1  # of HSDP, or of whole parameters where they are all ranks
    tensor_parallel: int = 1  # degree
    context_parallel: int = 1  # degree
    expert_parallel: int = 1  # degree
    pipeline_parallel: int = 1  # degree
    attention: Literal["sdpa", "flex"] = "sdpa"  # FlexAttention has no backward on a CPU
    schedule: str = "Interleaved1F1B"  # of a pipeline, whose microbatches have one sample
    local_batch_size: int = 1  # samples of a rank's batch
    # Samples of all ranks in a step; more than one for each accumulates, -1 is one.
    global_batch_size: int = -1


def trainer_config(recipe: Recipe, folder: Path, num_steps: int, pipeline: str | None) -> Any:
    """Returns the configuration of a trainer.

    ``folder`` has ``tests/assets``, and gets what torchtitan writes. ``pipeline`` is that of graph_trainer's
    passes; None for torchtitan's eager trainer.
    """
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.experiments.graph_trainer.common_utils import build_decoder_config_for_backend
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig, to_graph_trainer_config
    from torchtitan.models.common import Linear
    from torchtitan.models.common.param_init import skip_param_init

    models = importlib.import_module(f"torchtitan.models.{recipe.model}")
    registry = importlib.import_module(f"torchtitan.models.{recipe.model}.config_registry")
    config = getattr(registry, f"{recipe.model}_debugmodel")()
    build = getattr(models, f"{recipe.model.replace('_', '')}_configs")[recipe.flavor]
    has_experts = recipe.model == "deepseek_v3" or "moe" in recipe.flavor
    options = {"moe_comm_backend": "standard"} if has_experts else {}
    decoder = build_decoder_config_for_backend(build, recipe.attention, **options)
    if recipe.layers is not None:
        decoder.layers = [decoder.layers[index] for index in recipe.layers]
    decoder.enable_weight_tying = recipe.tied
    if recipe.tied:  # lm_head's initialization is the one that counts
        decoder.tok_embeddings.param_init = {"weight": skip_param_init}
    if recipe.biased:
        for layer in decoder.layers:
            _change(layer, Linear.Config, bias=True)
    if recipe.num_experts is not None:
        for layer in decoder.layers:
            _change(layer, object, num_experts=recipe.num_experts)
            if layer.moe is not None:
                layer.moe.router.gate.out_features = recipe.num_experts
    config.model_spec = replace(models.model_registry(recipe.flavor), model=decoder)
    if not recipe.chunked_loss and isinstance(config.loss, ChunkedLossWrapper.Config):
        config.loss = config.loss.loss_fn
    make_repeatable(config, folder, num_steps)
    config.dump_folder = str(folder / "out")
    config.training.mixed_precision_reduce = recipe.reduce_dtype
    config.training.local_batch_size = recipe.local_batch_size
    config.training.global_batch_size = recipe.global_batch_size
    config.parallelism.data_parallel_replicate_degree = recipe.num_replicas
    for axis in ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel"):
        setattr(config.parallelism, f"{axis}_degree", getattr(recipe, axis))
    config.parallelism.pipeline_parallel_schedule = recipe.schedule
    checkpoints = {"": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    config.activation_checkpoint = checkpoints[recipe.checkpointing]
    if pipeline is None:
        return config
    graph_models = importlib.import_module(f"torchtitan.experiments.graph_trainer.{recipe.model}")
    config = to_graph_trainer_config(config, graph_models.model_registry)
    config.compile = GraphTrainerCompileConfig(enable=True, pass_pipeline=pipeline)
    if recipe.checkpointing == "full":
        config.compile.memory_policy = "full"
    return config


def make_repeatable(config: Any, folder: Path, num_steps: int) -> None:
    """Lets a configuration train a few short steps on a CPU, the same each time, on the data in ``folder``."""
    config.hf_assets_path = str(folder / "tests" / "assets" / "tokenizer")
    config.dataloader.dataset = "c4_test"
    config.dataloader.dataset_path = str(folder / "tests" / "assets" / "c4_test")
    config.training.seq_len, config.training.steps = 64, num_steps
    config.training.disable_cuda_graphs = True  # else its check of options forbids expert parallelism
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed, config.debug.deterministic = 42, True


def _change(config: Any, kind: type, **changes: Any) -> None:
    """Sets fields of a configuration, and of all inside of it, where they are of a kind and have these fields."""
    names = {field.name for field in fields(config)}
    if isinstance(config, kind):
        for name in changes.keys() & names:
            setattr(config, name, changes[name])
    for value in (getattr(config, name) for name in names):
        if is_dataclass(value):
            _change(value, kind, **changes)


def _by_both(recipe: Recipe) -> tuple[Callable[[], Any], Callable[[], Any]]:
    make = functools.partial(trainer_config, recipe, Path(), 10)
    return functools.partial(make, None), functools.partial(make, "graphpasses")


llama3, graph_llama3 = _by_both(Recipe("llama3"))
llama3_tied, graph_llama3_tied = _by_both(Recipe("llama3", tied=True))
qwen3, graph_qwen3 = _by_both(Recipe("qwen3", tied=True, chunked_loss=True))
llama3_stages, graph_llama3_stages = _by_both(Recipe("llama3", pipeline_parallel=2, local_batch_size=4))
deepseek_v3, graph_deepseek_v3 = _by_both(Recipe("deepseek_v3"))
deepseek_v3_experts, graph_deepseek_v3_experts = _by_both(Recipe("deepseek_v3", expert_parallel=2))
