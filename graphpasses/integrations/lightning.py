"""PyTorch Lightning with captured steps: :class:`CapturedSteps` takes the place of what a strategy runs eagerly."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallelStrategy
from torch import Tensor, nn

from graphpasses.capture.train_step import capture_train_step
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from graphpasses.integrations.by_shape import Steps, StepsByShape
from graphpasses.ops.autograd_functions import alias_tensors
from graphpasses.state.patterns import COMPUTED


class CapturedSteps(StepsByShape):
    """Lets a strategy run the ``training_step`` and the backward of a module as captured steps.

    Written before the class of the strategy: ``class Mine(CapturedSteps, MyStrategy)``. Lightning's loop,
    accumulation, clipping, optimizer, schedules, callbacks and checkpoints stay as they are. Gradients are computed
    with the loss, and appear in backward. What ``training_step`` logs and returns beside the loss are results of the
    step: tensors and numbers. Refused are metrics that are objects, which the step would have to update, manual
    optimization, a ``backward`` of one's own, and the use of ``batch_idx``.

    A step is captured for each shape that the inputs of all ranks have together, at most eight: drop the last batch,
    or say in :attr:`dynamic_shapes` which of its dims vary.

    Example::

        from graphpasses.integrations.lightning import ModelParallelStrategy  # in the place of Lightning's

        trainer = Trainer(strategy=ModelParallelStrategy())
    """

    def setup(self, trainer: Any) -> None:
        """Prepares the strategy for a run; called by the trainer."""
        self.captured_steps: dict[int, Steps] = {}
        self._log = _Log()
        self._known_seeds: set[int] = set()
        super().setup(trainer)  # type: ignore[misc]

    def training_step(self, batch: Any, *indices: int) -> Any:
        """Runs the captured step of a microbatch; called by the trainer's loop.

        ``indices`` has the batch's number, where ``training_step`` takes it. Backward of the loss that it returns
        gives the parameters the gradients of the step.
        """
        module: LightningModule = self.lightning_module  # type: ignore[attr-defined]
        self._check(module)
        scale = module.trainer.accumulate_grad_batches
        parameters = [each for each in module.parameters() if each.requires_grad]
        earlier = [each.grad for each in parameters]
        # Lightning clears gradients between forward and backward, or adds to those of earlier microbatches.
        _set_gradients(parameters, [None] * len(parameters))
        try:
            # Of the class, and at each call: the step reads it, and what it reads must not change.
            with mock.patch.object(type(module), "log", self._log):
                step = self._step_for(
                    self.captured_steps.setdefault(scale, []),
                    module,
                    batch,
                    lambda: self._capture(module, batch, len(indices), scale),
                    "drop the last batch (drop_last=True), pad, or set dynamic_shapes",
                )
                result = step(batch)
            gradients = [each.grad for each in parameters]
        finally:
            _set_gradients(parameters, earlier)
        for name, value, options in result["logged"]:
            module.log(name, value, **options, **self._log.others[name])

        def give(seeds: Sequence[Tensor | None]) -> None:
            (seed,) = seeds
            assert seed is not None
            if scale not in self._known_seeds and not torch.equal(seed, torch.ones_like(seed) / scale):
                raise CaptureError("a hook scales the loss or its gradient, which a captured step does not follow")
            self._known_seeds.add(scale)
            for each, new in zip(parameters, gradients, strict=True):
                if new is not None:
                    each.grad = new if each.grad is None else each.grad.add_(new)

        (loss,) = alias_tensors(result["loss"].clone().requires_grad_(), before_backward=give)
        return {"loss": loss, **result["more"]}

    def _check(self, module: LightningModule) -> None:
        if not module.automatic_optimization:
            raise CaptureError("the module optimizes by itself: training_step runs its backward and its optimizers")
        if type(module).backward is not LightningModule.backward:
            raise CaptureError("the module has a backward of its own, which a captured step does not run")

    def _capture(self, module: LightningModule, batch: Any, num_indices: int, scale: int) -> CapturedStep:
        training_step = super().training_step  # type: ignore[misc]

        def loss_fn(module: LightningModule, batch: Any) -> dict[str, Any]:
            output = training_step(batch, *[_BatchIndex()] * num_indices)
            more = dict(output) if isinstance(output, Mapping) else {"loss": output}
            loss = more.pop("loss", None)
            # The trainer divides the loss, which is returned, and logged, as it is.
            if scale != 1 and isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(lambda seed: seed / scale)  # type: ignore[no-untyped-call]
            logged, self._log.logged = self._log.logged, []
            return {"loss": loss, "more": more, "logged": logged}

        return capture_train_step(
            loss_fn, module, batch, dynamic_shapes=self.dynamic_shapes and (self.dynamic_shapes,)
        )


class ModelParallelStrategy(CapturedSteps, _ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` with captured steps: the same arguments, losses, weights and logs."""


class _Log:
    """Stands for ``LightningModule.log`` while a module is traced."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []  # with options that a step returns, as a batch size
        self.others: dict[str, dict[str, Any]] = {}  # by name, functions and groups

    def __call__(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        if not isinstance(value, (int, float, *COMPUTED)):
            raise CaptureError(
                f"training_step logs '{name}', a {type(value).__name__}; a captured step returns tensors and "
                "numbers. Update and log a metric in a hook, as on_train_batch_end"
            )
        _, _, _, *given = _LOG.bind(self, name, value, *arguments, **options).arguments.items()
        returned = {key: each for key, each in given if isinstance(each, (int, str, type(None), *COMPUTED))}
        others = {key: each for key, each in given if key not in returned}
        if self.others.setdefault(name, others) != others:
            raise CaptureError(f"training_step logs '{name}' in two ways, with {self.others[name]} and {others}")
        self.logged.append((name, value, returned))


_LOG = inspect.signature(LightningModule.log)


def _refuse(*_: Any) -> Any:
    raise CaptureError("training_step reads its batch_idx, which is another number at each step")


class _BatchIndex:
    """Stands for the number of a batch, which may be handed on, and not be read."""

    __bool__ = __int__ = __index__ = __float__ = __str__ = __format__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse


def _set_gradients(parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> None:
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient
