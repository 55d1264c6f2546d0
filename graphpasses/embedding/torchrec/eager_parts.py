"""What runs eagerly in a compiled model: patches that break the graph where TorchRec does what no graph can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from graphpasses._torch.patching import constant
from graphpasses.embedding.torchrec.input_dists import shardings_of
from graphpasses.errors import UnsupportedError

_OPTIMIZERS = ("EMAINPLACE_ROWWISE_ADAGRAD", "ENSEMBLE_ROWWISE_ADAGRAD")
_WEIGHT_DECAYS = ("COUNTER", "COWCLIP")
_REASON = "the optimizer of these tables decides by its steps, which no graph can: their lookup runs eagerly"


def managed_collisions(original: None) -> Callable[..., Any]:
    """Makes a sharded module of managed collisions run eagerly: it replaces the memory of its buffers."""
    reason = "zero-collision hashing replaces the memory of its buffers, which no graph can: it runs eagerly"
    forward = _inherited_forward()
    return _eagerly_if(lambda module: True, forward, _waiting(forward), reason)


def embeddings_by_steps(original: None) -> Callable[..., Any]:
    """Makes a sharded collection run eagerly, on all ranks, if an optimizer of its tables decides by its steps."""
    forward = _inherited_forward()
    return _eagerly_if(lambda module: module.graphpasses_decides_by_steps(), forward, _waiting(forward), _REASON)


@constant
def graphpasses_decides_by_steps(self: Any) -> bool:
    """Whether an optimizer of a collection's tables, on any rank, decides by its steps."""
    names = "_grouped_embedding_configs_per_rank"
    ranks = (rank for each in shardings_of(self) for rank in getattr(each, names, ()))
    params = (config.fused_params or {} for rank in ranks for config in rank)
    return any(
        getattr(each.get("optimizer"), "name", "") in _OPTIMIZERS
        or getattr(each.get("weight_decay_mode"), "name", "") in _WEIGHT_DECAYS
        for each in params
    )


def lookup_by_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a TBE run eagerly if its optimizer decides by its steps, where no sharded collection does."""

    def decides(module: Any) -> bool:
        return bool(module._used_rowwise_adagrad_with_counter) or module.optimizer.name in _OPTIMIZERS

    return _eagerly_if(decides, original, original, _REASON)


def begun_by_pipeline(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes what a pipeline put in the place of a module's forward run eagerly: its input dist runs already."""
    reason = (
        "TorchRec's pipeline has begun this module's input dist, so it runs eagerly: give the pipeline what "
        "torch.compile(model) returns, not a model compiled in place, to have it in the graph"
    )
    return _eagerly_if(lambda module: True, original, _waiting(original), reason)


def check_pipeline() -> None:
    """Raises if the pipeline that traces a compiled model now is ``TrainPipelineSemiSync``, whose bits no loop has.

    Other pipelines find no module in a compiled model whose input dist they could start early, so they have a loop's.
    """
    pipelines = sys.modules.get("torchrec.distributed.train_pipeline.train_pipelines")
    frame: FrameType | None = sys._getframe(1)
    while pipelines is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), pipelines.TrainPipelineSemiSync):
            raise UnsupportedError(
                "TrainPipelineSemiSync looks up a batch before the update of the one before it, which a compiled "
                "model does not: give it the uncompiled model, or use TrainPipelineSparseDist"
            )
        frame = frame.f_back


def _inherited_forward() -> Callable[..., Any]:
    from torchrec.distributed.types import ShardedModule

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ShardedModule.forward(self, *args, **kwargs)

    return forward


def _eagerly_if(
    condition: Callable[[Any], bool], original: Callable[..., Any], eager: Callable[..., Any], reason: str
) -> Callable[..., Any]:
    """Returns what breaks the graph and runs ``eager`` where Dynamo traces a module of which a condition holds."""
    eagerly: Callable[..., Any] = torch.compiler.disable(eager, reason=reason)  # type: ignore[no-untyped-call]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and condition(self):
            return eagerly(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    call.__name__ = original.__name__
    return call


def _waiting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that waits for its outputs, since no graph can wait for what was sent eagerly."""
    from torchrec.distributed.types import LazyNoWait

    def wait(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        if isinstance(outputs, tuple):
            return tuple(LazyNoWait(output.wait()) for output in outputs)
        return LazyNoWait(outputs.wait())

    return wait
