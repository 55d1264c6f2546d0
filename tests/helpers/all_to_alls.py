"""Small graphs with all-to-alls, and the operators to write them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphpasses.graph import (
    ALL_TO_ALL,
    WAIT,
    GraphInput,
    GraphOutput,
    InputKind,
    OutputKind,
    Stage,
    TrainGraph,
)
from graphpasses.identity import IdentityMap

Step = Callable[..., Sequence[Tensor]]


def exchange(
    x: Tensor, output_splits: Sequence[Any], input_splits: Sequence[Any], group: str | None = None
) -> Tensor:
    """Sends rows to each rank of a group, by default of all ranks."""
    return WAIT(ALL_TO_ALL(x, output_splits, input_splits, group or dist.group.WORLD.group_name))


def evenly(x: Tensor, group: str | None = None, splits: Sequence[int] = ()) -> Tensor:
    """Exchanges one row with each rank, or as many as ``splits`` says."""
    splits = splits or [1] * dist.get_world_size()
    return exchange(x, splits, splits, group)


def capture(
    fn: Step,
    *inputs: Tensor,
    remembered: dict[Hashable, Any] | None = None,
    stage: Stage = Stage.STEP,
    kinds: Sequence[InputKind] = (),
    is_fixed: bool = False,
) -> TrainGraph:
    """Traces a step; rows are symbols, unless they are fixed."""
    module = make_fx(fn, tracing_mode="fake" if is_fixed else "symbolic")(*inputs)
    model = nn.Module()
    kinds = kinds or [InputKind.BATCH if stage is Stage.STEP else InputKind.VALUE] * len(inputs)
    num_outputs = len(module.graph.output_node().args[0])
    return TrainGraph(
        module=module,
        inputs=tuple(GraphInput(kind, f"input {index}") for index, kind in enumerate(kinds)),
        outputs=tuple(GraphOutput(OutputKind.VALUE, f"output {index}") for index in range(num_outputs)),
        identity=IdentityMap.of(model),
        parameters={},
        model=model,
        stage=stage,
        remembered={} if remembered is None else remembered,
    )
