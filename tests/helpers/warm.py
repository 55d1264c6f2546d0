"""What a first capture imports and looks up, done once in the server that ranks are forked from."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphpasses as gp
from graphpasses._torch.fake_process_group import fake_process_group

torch.set_num_threads(1)  # a child has none of its parent's threads
with fake_process_group(2):
    _model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    fully_shard(_model, mesh=init_device_mesh("cpu", (2,)))
    _step = gp.capture_train_step(lambda model, x: model(x).square().mean(), _model, torch.ones(2, 2))
    gp.default_pipeline().run(_step)(torch.ones(2, 2))
gp.compile(nn.Linear(2, 1), inner="aot_eager")(torch.ones(3, 2)).sum().backward()
torch._dynamo.reset()
