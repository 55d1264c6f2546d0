"""TorchRec's pipelines around a compiled model."""

from __future__ import annotations

import sys
from types import FrameType

from graphpasses.errors import UnsupportedError


def check_pipeline() -> None:
    """Raises if the pipeline that traces a compiled model now is ``TrainPipelineSemiSync``.

    A pipeline finds no module in a compiled model whose input dist it could start early: the graph starts its own.
    So a model is trained as without a pipeline, with its bits. That pipeline alone has other bits than a plain loop.
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
