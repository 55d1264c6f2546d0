"""What a program is given: batches, steps that run in one of the ways, and what notes all that a loop can observe."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import graphpasses as gp
from graphpasses._torch.fsdp2 import fsdp_groups
from graphpasses._torch.fsdp2_accumulation import unreduced_gradient

Way = Literal["eager", "again", "control", "captured", "pipeline", "compiled"]
OURS: tuple[Way, ...] = ("captured", "pipeline", "compiled")
_SWITCHES = ("set_requires_gradient_sync", "set_requires_all_reduce")  # the first sets the second, too


class Recorder:
    """What a program is given.

    Args:
        way: how steps run.
        folder: where all ranks may leave checkpoints.
    """

    def __init__(self, way: Way, folder: Path) -> None:
        self.way, self.folder = way, folder
        self.values: list[tuple[str, str]] = []
        self.refusals: list[str] = []
        self.warnings: list[str] = []  # of graphpasses
        self._compiled: dict[nn.Module, Any] = {}
        self._switches: dict[nn.Module, dict[str, bool]] = {}

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def floats(self, step: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=self._generator(step))

    def integers(self, step: int) -> torch.Tensor:
        return torch.randint(8, (4,), generator=self._generator(step))

    def _generator(self, step: int) -> torch.Generator:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return torch.Generator().manual_seed(1000 * step + 10 * rank + (self.way == "control" and step == 2))

    @contextmanager
    def switches_noted(self) -> Iterator[None]:
        """Notes in the block which modules FSDP2 is told not to reduce: eager's half asks nothing of graphpasses."""

        def note(name: str) -> Callable[..., None]:
            torchs = getattr(FSDPModule, name)

            def switch(module: Any, on: bool, *, recurse: bool = True) -> None:
                torchs(module, on, recurse=recurse)
                for each in filter(is_sharded, module.modules() if recurse else [module]):
                    self._switches.setdefault(each, {}).update(dict.fromkeys(_SWITCHES[_SWITCHES.index(name) :], on))

            return switch

        with mock.patch.multiple(FSDPModule, **{name: note(name) for name in _SWITCHES}):
            yield

    def keeps(self, model: nn.Module) -> bool:
        """Whether FSDP2 was told to keep gradients of a model's next backward, all-reduces only between replicas."""
        is_hsdp = any(each.device_mesh.ndim > 1 for each in model.parameters() if isinstance(each, DTensor))
        needed = _SWITCHES if is_hsdp else _SWITCHES[:1]
        return any(not self._switches.get(each, {}).get(name, True) for each in model.modules() for name in needed)

    @contextmanager
    def keeping(self, model: nn.Module) -> Iterator[None]:
        """Lets FSDP2 keep a model's gradients in the block."""
        sharded = [*filter(is_sharded, model.modules())]
        noted = {each: dict(self._switches.get(each, {})) for each in sharded}
        for each in sharded:
            each.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for each in sharded:
                for name in _SWITCHES:
                    getattr(each, name)(noted[each].get(name, True), recurse=False)

    def step(self, *args: Any, **options: Any) -> Step:
        return Step(self, *args, **options)

    def compiled(self, model: nn.Module) -> Any:
        """Returns the model, compiled once."""
        if model not in self._compiled:
            self._compiled[model] = gp.compile(model, inner="aot_eager")
        return self._compiled[model]

    def attempt(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls what may raise, as a loop that goes on with its next batch."""
        try:
            self.log("tried", *pytree.tree_leaves(function(*args)))
        except gp.GraphPassesError:
            raise
        except Exception as error:
            self.log("tried", type(error).__name__)

    def log(self, name: str, *values: Any) -> None:
        self.values += [(name, text_of(value)) for value in values]

    def record(self, **objects: Any) -> None:
        """Notes all that a loop can see of its objects after a step."""
        for name, value in objects.items():
            if isinstance(value, nn.Module):
                self._record_module(name, value)
            elif isinstance(value, Step):
                self.log(f"{name}.grad_norm", value.grad_norm)
            else:
                self._record_leaves(name, value.state_dict() if hasattr(value, "state_dict") else value)
        self.log("random", torch.get_rng_state(), hash(random.getstate()), torch.is_grad_enabled())

    def _record_leaves(self, of: str, tree: Any) -> None:
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, (torch.Tensor, float, int, str, type(None))):
                self.log(of + pytree.keystr(path), leaf)

    def _record_places(self, of: str, module: nn.Module) -> None:
        """Notes what a module's own lists, dicts and objects hold."""
        for name, value in vars(module).items():
            if name[0] != "_" and isinstance(value, (list, dict, SimpleNamespace)):
                self._record_leaves(f"{of}.{name}", vars(value) if isinstance(value, SimpleNamespace) else value)

    def _record_module(self, of: str, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.log(f"{of}.{name}", parameter, parameter.grad)
        for name, buffer in model.named_buffers():
            self.log(f"gradient of buffer {of}.{name}", buffer.grad if buffer.is_leaf else None)
        for name, module in model.named_modules():
            kinds = torch.Tensor, int, float, type(None)
            values = {key: value for key, value in vars(module).items() if key[0] != "_" and isinstance(value, kinds)}
            self.log(f"module {of}.{name}", *module.buffers(recurse=False), sorted(values))
            self.log(f"attributes of {of}.{name}", *(values[key] for key in sorted(values)))
            self._record_places(f"places of {of}.{name}", module)
        for index, group in enumerate(fsdp_groups(model)):
            self.log(f"waits in group {index} of {of}", *map(unreduced_gradient, group.fsdp_params))


class Step:
    """A step, which is captured once for each shape of a batch.

    A refused call is followed by another capture, and a refused capture by an eager step, so that what a refusal
    leaves behind shows, too.

    Args:
        recorder: decides how it runs, and gets the refusals.
        loss_fn: as that of ``capture_train_step``.
        model: what trains.
        optimizer: ends the step, if there is one.
        options: others of ``capture_train_step``.
    """

    def __init__(
        self, recorder: Recorder, loss_fn: Any, model: nn.Module, optimizer: Any = None, **options: Any
    ) -> None:
        self._recorder, self._loss_fn, self._model, self._options = recorder, loss_fn, model, options
        self._optimizer, self._captured = optimizer, dict[Any, Any]()
        self.grad_norm: Any = None

    def __call__(self, *batch: Any) -> Any:
        return self._run("__call__", self.eager, batch)

    def accumulate(self, *batch: Any) -> Any:
        return self._run("accumulate", self._kept, batch)

    def check(self, *batch: Any) -> None:
        self._run("check", lambda *_: None, batch)

    def eager(self, *batch: Any) -> Any:
        """Runs an eager step, which updates nothing where gradients are kept."""
        result = self._backward(*batch)
        if self._optimizer is not None and not self._recorder.keeps(self._model):
            optimizers = self._optimizer if isinstance(self._optimizer, tuple) else (self._optimizer,)
            if (clip := self._options.get("clip_norm")) is not None:
                updated = {each for one in optimizers for group in one.param_groups for each in group["params"]}
                others = [each for other in self._options.get("others", ()) for each in other.parameters()]
                clipped = [*self._model.parameters(), *(each for each in others if each in updated)]
                norm = nn.utils.clip_grad_norm_(clipped, clip)
                self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            for each in optimizers:
                each.step()
                each.zero_grad()
        return result

    def _kept(self, *batch: Any) -> Any:
        with self._recorder.keeping(self._model):
            return self._backward(*batch)

    def _backward(self, *batch: Any) -> Any:
        with torch.enable_grad():
            is_compiled = self._recorder.way == "compiled"
            result = self._loss_fn(self._recorder.compiled(self._model) if is_compiled else self._model, *batch)
            loss_of(result).backward()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def _run(self, name: str, eager: Callable[..., Any], batch: tuple[Any, ...]) -> Any:
        if self._recorder.way not in OURS[:2]:
            return eager(*batch)
        key = tuple(getattr(each, "shape", None) for each in pytree.tree_leaves(batch))
        for _ in range(2):
            try:
                if key not in self._captured:
                    self._captured[key] = self._capture(batch)
                result = getattr(self._captured[key], name)(*batch)
                if name == "__call__" and not self._recorder.keeps(self._model):
                    self.grad_norm = self._captured[key].grad_norm
                return result
            except gp.GraphPassesError as error:
                self._captured.pop(key, None)
                self._recorder.refusals.append(str(error))
            except Exception:
                if key not in self._captured:
                    eager(*batch)  # raises itself, behind what it does before
                raise
        return eager(*batch)

    def _capture(self, batch: tuple[Any, ...]) -> Any:
        step = gp.capture_train_step(self._loss_fn, self._model, *batch, optimizer=self._optimizer, **self._options)
        if self._recorder.way == "captured":
            return step
        return gp.default_pipeline(gp.BucketPlan.from_modules([]) if self._recorder.num_ranks == 1 else None).run(
            step
        )


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 runs a module."""
    return isinstance(module, FSDPModule)


def loss_of(result: Any) -> Any:
    """Returns the loss of what a step returned."""
    return result["loss"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result


def text_of(value: Any) -> str:
    """Returns what tells two values apart: of a tensor dtype, shape and bits."""
    if not isinstance(value, torch.Tensor):
        return repr(value) if not callable(value) else "a function"
    if isinstance(value, DTensor):
        return f"{value.placements} {text_of(value.to_local())}"
    if value.numel() and not value.untyped_storage().size():
        return "freed"
    data = value.detach().clone().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype}{[*value.shape]} {sha256(data.numpy().tobytes()).hexdigest()[:12]}"
