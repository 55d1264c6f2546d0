"""TorchRec's pipelines around a compiled model."""

from __future__ import annotations

import sys
from types import FrameType

from graphpasses.errors import UnsupportedError


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
