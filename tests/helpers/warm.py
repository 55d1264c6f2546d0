"""Imported by the server from which ranks are forked: captures a step there, for which each rank would take a second.

A process's first capture takes twice as long as its second: torch looks for what tells the results of each operator,
and we look through all modules and operators that there are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.passes import default_pipeline
from tests.helpers.models import LanguageModel, next_token_loss, token_batch


def train() -> None:
    """Captures, rewrites, proves and runs a step, on one of two ranks that do not communicate."""
    model, batch = LanguageModel(num_blocks=1), token_batch(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    next_token_loss(model, *batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    captured = capture_train_step(next_token_loss, model, *batch, optimizer=optimizer, check=False)
    default_pipeline().run(captured)(*batch)


# Where torch was built for an accelerator FSDP2's backward starts threads, which a fork does not have.
if not torch.backends.cuda.is_built() and not torch.accelerator.is_available():
    with torch.random.fork_rng(devices=[]), fake_process_group(2):
        train()
    # A rank's mesh is equal to this one, and has another group.
    _clear_sharding_prop_cache()
    dist.distributed_c10d._world.group_count = 0
