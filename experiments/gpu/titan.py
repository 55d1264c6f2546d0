"""torchtitan's trainers as two ranks on one device: its eager trainer, and graph_trainer with our passes."""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

from experiments.gpu.ranks import register_backend
from experiments.gpu.result import require

__all__ = ["trainers"]

_EAGER, _AGAIN, _OURS, _THEIRS = "eager", "eager again", "graphpasses", "default"


def trainers(device: str, num_steps: int) -> tuple[bool, list[tuple[str, str]]]:
    """Losses, gradients, their norm and weights of torchtitan's debug models, with SDPA and with FlexAttention.

    The control is graph_trainer's own pipeline, which adds gradients of tied weights after their reductions.
    """
    require("torchtitan", "datasets", "rich")
    from experiments.harness.verdict import Comparison, Must, judge
    from graphpasses.commands.train_torchtitan_on_cpu import make_assets
    from graphpasses.integrations.torchtitan.cpu_configs import Recipe

    tied = Recipe("llama3", tied=True)
    cases = [("llama3 tied", tied, 2), ("deepseek_v3, experts shared", Recipe("deepseek_v3", expert_parallel=2), 2)]
    if device == "cuda":  # its backward does not run on a CPU
        cases.append(("llama3 tied, FlexAttention", replace(tied, attention="flex"), 2))
        cases.append(("llama3, FlexAttention, a CUDA graph, one rank", Recipe("llama3", attention="flex"), 1))
    is_right, found = True, []
    for name, recipe, num_ranks in cases:
        wanted: dict[str, Must] = {_AGAIN: "equal"} if recipe.attention == "flex" else {}
        wanted[_OURS] = "equal"
        if recipe.tied:
            wanted[_THEIRS] = "differ"
        with tempfile.TemporaryDirectory() as folder:
            make_assets(Path(folder))
            try:
                for pipeline in (_EAGER, *wanted):
                    given = (num_ranks, get_free_port(), device, recipe, pipeline, num_steps, folder)
                    mp.spawn(_train, given, nprocs=num_ranks)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                is_right = False  # the other models are trained all the same
                found.append((name, f"{pipeline}: {str(error).strip().splitlines()[-1]}"))
                continue
            verdicts = [
                judge("", Comparison(run, _EAGER, must), Path(folder), num_steps) for run, must in wanted.items()
            ]
        is_right &= all(verdict.status == "ok" for verdict in verdicts)
        found.append((name, "; control ".join(verdict.result for verdict in verdicts)))
    return is_right, found


def _fix_kernels() -> None:
    """Lets FlexAttention take the kernels that it begins with: torchtitan has each run choose by their time."""
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention.inductor_configs.update(max_autotune=False, coordinate_descent_tuning=False)
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=FlexAttention.inductor_configs)


def _train(
    rank: int, num_ranks: int, port: int, device: str, recipe: Any, pipeline: str, num_steps: int, folder: str
) -> None:
    """Trains in a process that looks as if torchrun had started it, with one device."""
    sizes = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(size) for name, size in sizes.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HF_HUB_OFFLINE="1")
    warnings.simplefilter("ignore")  # torchtitan's
    if device == "cpu":
        from graphpasses.commands.train_torchtitan_on_cpu import use_cpu

        use_cpu()
    elif num_ranks > 1:
        register_backend(device)
        dist.Backend.default_device_backend_map[device] = "nccl_sim_host"
    if recipe.attention == "flex":
        _fix_kernels()
    if not hasattr(dist, "set_timeout"):  # torchtitan's torch is newer
        vars(dist)["set_timeout"] = lambda timeout, group=None: None
    from experiments.harness.verdict import run_path
    from graphpasses.integrations.torchtitan import pass_pipeline  # noqa: F401  registers the pipeline
    from graphpasses.integrations.torchtitan.cpu_configs import trainer_config
    from graphpasses.parity.record_trainer import recorded

    graphs = None if pipeline in (_EAGER, _AGAIN) else pipeline
    if graphs is not None:  # it places the process, with an argument that torch 2.13 does not take
        from torchtitan.experiments.graph_trainer import trainer as titan

        vars(titan)["_maybe_apply_numa_binding"] = lambda *_: None
    config = trainer_config(recipe, Path(folder), num_steps, graphs)
    # None takes collectives that travel over the host; and what ours is compared with is eager, kernel by kernel.
    config.training.disable_cuda_graphs = num_ranks > 1 or graphs is None
    if pipeline == _THEIRS and device == "cuda":  # has them without being asked
        config.compile.disable_passes = ["cudagraph_pass"]
    trainer = config.build()
    with recorded(trainer, run_path(Path(folder), "", pipeline), run=pipeline):
        trainer.train()
    trainer.close()
    dist.destroy_process_group()
