"""Hugging Face's ``Trainer`` with captured steps: :class:`CapturedSteps` takes the place of what it runs eagerly."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import Trainer as _Trainer

from graphpasses.capture.train_step import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.integrations.by_shape import StepsByShape


class CapturedSteps(StepsByShape):
    """Lets a trainer run its forward, loss and backward as captured steps.

    Written before the class of the trainer, whose ``compute_loss`` may be its own: ``class Mine(CapturedSteps,
    MyTrainer)``. The trainer's ``training_step`` is what is traced, up to its backward. Its loop, clipping,
    optimizer, schedules, logs and checkpoints stay as they are, and accumulation by ``gradient_accumulation_steps``
    is FSDP2's. A trainer that keeps metrics while it computes the loss, as TRL's do, is refused.

    A step is captured for each shape that the inputs of all ranks have together, at most eight: pad to a fixed
    length, or say in :attr:`dynamic_shapes` which dims of ``(inputs, num_items_in_batch)`` vary.

    Example::

        from graphpasses.integrations.transformers import Trainer  # in the place of transformers.Trainer

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
    """

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Runs the captured step of a microbatch; called by the trainer's loop.

        The loss is divided by ``num_items_in_batch``, the number of tokens over all microbatches, if it is given.
        """
        trainer: Any = self
        # As the trainer does, since an evaluation may have been before.
        for each in (model, trainer.optimizer):
            if callable(getattr(each, "train", None)):
                each.train()
        batch = dict(inputs), num_items_in_batch
        step = self._step_for(
            vars(self).setdefault("captured_steps", []),
            model,
            batch,
            lambda: self._capture(model, batch),
            "pad them to a fixed length (a data collator with padding='max_length'), drop the last batch "
            "(dataloader_drop_last=True), or set dynamic_shapes",
        )
        loss: torch.Tensor = step(*batch)
        return loss

    def _capture(self, model: nn.Module, batch: tuple[Any, ...]) -> CapturedStep:
        trainer: Any = self
        if trainer.accelerator.gradient_accumulation_steps != 1:
            raise CaptureError(
                "accelerate divides the loss by gradient_accumulation_steps of its own, which the loss that is "
                "logged is not; give it to TrainingArguments"
            )
        install_recording_hooks(model)
        loss_fn = _loss_of(trainer, super().training_step)  # type: ignore[misc]
        return capture_train_step(loss_fn, model, *batch, dynamic_shapes=self.dynamic_shapes)


class Trainer(CapturedSteps, _Trainer):
    """``transformers.Trainer`` with captured steps: the same arguments, losses, weights, logs and checkpoints."""


def install_recording_hooks(model: nn.Module) -> None:
    """Installs the hooks by which transformers 5 collects router logits and the like, which 4 does without.

    It installs them when a forward first needs them; a step that is captured then would install them by itself.
    """
    try:
        output_capturing = importlib.import_module("transformers.utils.output_capturing")
    except ModuleNotFoundError:
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            output_capturing.maybe_install_capturing_hooks(module)


def _loss_of(trainer: Any, training_step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns what computes the loss that the trainer's own step gives to backward.

    It is a method of the trainer, all of whose attributes that the step reads are then watched.
    """

    def loss_fn(trainer: Any, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        # Of the class: what is set of an object that the step reads counts as a change.
        keep = mock.patch.object(
            type(trainer.accelerator), "backward", lambda _, loss, **options: losses.append(loss)
        )
        with keep:
            training_step(model, dict(inputs), num_items_in_batch)
        return losses[0]

    return MethodType(loss_fn, trainer)
