"""The collectives of a step of FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from experiments.fsdp_bench.steps import transformer
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.fsdp.layout import eager_layout
from graphpasses.fsdp.traffic import layout_traffic
from graphpasses.scale import Traffic

__all__ = ["step_of"]


def step_of(num_ranks: int) -> Traffic:
    """Returns what a GPT-like model of 6 layers of 256 sends in a step, one bucket per layer, all in fp32.

    Args:
        num_ranks: of its world, which need not exist.
    """
    with fake_process_group(num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,))
        model = transformer(6, 256, 2048)
        for module in [*model.layers, model]:
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        return layout_traffic(eager_layout(model), num_ranks, num_tokens=0, param_dtype="float32")
