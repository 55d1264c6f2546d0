"""graph_trainer's pipelines: sums of microbatches, and what is refused. Whole runs are in test_pass_pipeline.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpasses.errors import UnsupportedError

pytest.importorskip("torchtitan")


def gradients(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, generator=generator).bfloat16() for _ in range(num)]


def test_microbatches_are_added_as_fsdp2_adds_them() -> None:
    from graphpasses.integrations.torchtitan.stages import MicrobatchSums

    first, second, third = gradients(3)
    dtypes = {0: torch.float32}
    sums = MicrobatchSums()
    sums.add([first.clone(), None])
    sums.post_backward(dtypes)  # of the second microbatch, whose weights are late
    sums.add([second.clone(), None])
    sums.add([third.clone(), None])
    sums.post_backward(dtypes)
    total, other = sums.take(2)
    assert other is None
    assert total.dtype == torch.float32
    assert torch.equal(total, first.float() + (second + third))
    assert not torch.equal(total, first.float() + second.float() + third.float())
    assert sums.take(2) == [None, None]


def test_sums_in_the_dtype_of_compute() -> None:
    from graphpasses.integrations.torchtitan.stages import MicrobatchSums

    first, second = gradients(2)
    sums = MicrobatchSums()
    for gradient in (first, second):
        sums.add([gradient.clone()])
        sums.post_backward({0: torch.bfloat16})
    assert torch.equal(sums.take(1)[0], first + second)
    sums.add([first.clone()])
    sums.clear()
    assert sums.take(1) == [None]


class Schedule:
    """Takes microbatches one by one, as torch 2.14's schedules do."""

    def step(self, *, arg_mbs: Any) -> None:
        """Runs no stage."""


class Older:
    """Cuts a batch into microbatches, as torch 2.13's schedules do."""

    def step(self, *args: Any) -> None:
        """Runs no stage."""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pp_schedule": None}, "graph_trainer runs the stages of 'graph_trainer/qwen3' without graphs"),
        ({"schedule": Older()}, "torchtitan 0.3.0 gives a pipeline its microbatches one by one"),
        ({"tp": True}, "tensor parallelism with a pipeline"),
        ({"ep_overlap": True}, "--compile.ep_overlap.enabled with a pipeline"),
        ({"is_chunked": True}, "a chunked loss with a pipeline"),
        ({}, ""),
    ],
)
def test_pipelines_that_are_refused(changes: dict[str, Any], why: str) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.experiments.graph_trainer.graph_pp.runner import GraphPipelineRuntime

    from graphpasses.integrations.torchtitan.refusals import _refuse_stages

    runtime = object.__new__(GraphPipelineRuntime)
    runtime.schedule = changes.get("schedule", Schedule())
    loss = CrossEntropyLoss.Config()
    if changes.get("is_chunked"):
        loss = ChunkedLossWrapper.Config(loss_fn=loss)
    trainer = SimpleNamespace(
        pp_schedule=changes.get("pp_schedule", runtime),
        parallel_dims=SimpleNamespace(tp_enabled=changes.get("tp", False)),
        loss_fn=loss.build(compile_config=None),
        config=SimpleNamespace(
            model_spec=SimpleNamespace(name="graph_trainer/qwen3"),
            parallelism=SimpleNamespace(pipeline_parallel_schedule="Interleaved1F1B"),
            compile=SimpleNamespace(ep_overlap=SimpleNamespace(enabled=changes.get("ep_overlap", False))),
        ),
    )
    if not why:
        _refuse_stages(trainer)
        return
    with pytest.raises(UnsupportedError, match=why) as caught:
        _refuse_stages(trainer)
    assert "pipeline_parallel_degree 1" in str(caught.value) or "another --compile" in str(caught.value)
