"""PyTorch Lightning with captured steps: :class:`CapturedSteps` takes the place of what a strategy runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallelStrategy
from torch import Tensor, nn

from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses.capture.train_step import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.integrations.by_shape import Steps, step_for
from graphpasses.passes.pipelines import default_pipeline
from graphpasses.passes.runner import Pipeline


class CapturedSteps:
    """..."""

    pipeline: Pipeline | None = None
    dynamic_shapes: Any = None

    def training_step(self, batch: Any, *indices: int) -> Tensor:
        strategy: Any = self
        module, scale = strategy.lightning_module, strategy.lightning_module.trainer.accumulate_grad_batches
        parameters = [each for each in module.parameters() if each.requires_grad]
        earlier = [each.grad for each in parameters]
        for each in parameters:
            each.grad = None
        captured = vars(self).setdefault("captured_steps", {}).setdefault(scale, [])
        logged = []
        step = self._capture(module, batch, len(indices), scale, logged)
        loss = step(batch)
        gradients = [each.grad for each in parameters]
        for each, grad in zip(parameters, earlier):
            each.grad = grad
        for name, options in logged:
            module.log(name, loss, **options)
        return _Backward.apply(torch.ones((), requires_grad=True), loss, parameters, gradients, scale)

    def _capture(self, module, batch, num_indices, scale, logged):
        training_step = super().training_step
        def loss_fn(module, batch):
            kept = []
            def log(module, name, value, **options):
                kept.append((name, value, options))
            with mock.patch.object(type(module), "log", log):
                loss = training_step(batch, *[BatchIndex()]*num_indices)
            logged[:] = [(name, options) for name, value, options in kept if value is loss]
            loss.register_hook(lambda grad: grad / scale)
            return loss
        step = capture_train_step(loss_fn, module, batch)
        return default_pipeline().run(step)

class BatchIndex: pass

class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, loss, parameters, gradients, scale):
        ctx.given = parameters, gradients, scale
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        parameters, gradients, scale = ctx.given
        for each, new in zip(parameters, gradients):
            if new is None: continue
            if each.grad is None: each.grad = new
            else: each.grad += new
        return None, None, None, None, None


class ModelParallelStrategy(CapturedSteps, _ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with captured steps: the same arguments, losses, weights, logs, checkpoints."""
