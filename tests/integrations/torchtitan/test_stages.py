"""graph_trainer's pipelines: sums of microbatches, and what is refused. Whole runs are in test_pass_pipeline.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphpasses.errors import BatchMismatchError, CaptureError, UnsupportedError

pytest.importorskip("torchtitan")


def gradients(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, generator=generator).bfloat16() for _ in range(num)]


def test_microbatches_are_added_as_fsdp2_adds_them() -> None:
    from graphpasses.integrations.torchtitan.stage_sums import MicrobatchSums

    first, second, third = gradients(3)
    dtypes = {0: torch.float32}
    sums = MicrobatchSums()
    sums.add([first.clone(), None])
    sums.post_backward(dtypes)  # of the second microbatch, whose weights are late
    sums.add([second.clone(), None])
    sums.add([third.clone(), None])
    sums.post_backward(dtypes)
    total, other = sums.take(range(2))
    assert other is None
    assert total.dtype == torch.float32
    assert torch.equal(total, first.float() + (second + third))
    assert not torch.equal(total, first.float() + second.float() + third.float())
    assert sums.take([0, 1]) == [None, None]


def test_parameters_whose_gradient_is_one_tensor() -> None:
    from graphpasses.integrations.torchtitan.stage_sums import MicrobatchSums

    first, second = gradients(2)
    sums = MicrobatchSums()
    for gradient in (first, second):
        sums.add([gradient, gradient])
    assert all(torch.equal(total, first + second) for total in sums.take([0, 1]))
    assert torch.equal(first, gradients(1)[0])


def test_sums_in_the_dtype_of_compute() -> None:
    from graphpasses.integrations.torchtitan.stage_sums import MicrobatchSums

    first, second = gradients(2)
    sums = MicrobatchSums()
    for gradient in (first, second):
        sums.add([gradient.clone()])
        sums.post_backward({0: torch.bfloat16})
    assert torch.equal(sums.take([0])[0], first + second)
    sums.add([first.clone()])
    sums.clear()
    assert sums.take([0]) == [None]


class Scaled(nn.Module):
    """Reads an attribute while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def test_a_stage_is_checked() -> None:
    from graphpasses.integrations.torchtitan.guards import StageWatch

    module = Scaled()
    watch = StageWatch(module, None)
    with watch.watched():
        module(torch.ones(2))
    watch.check(module)
    check = watch.checks_inputs([torch.ones(2, 4)], 1)
    check([torch.zeros(2, 4)])
    with pytest.raises(BatchMismatchError, match="input 0 of stage 1 differs"):
        check([torch.zeros(1, 4)])
    module.shift = 3.0
    with pytest.raises(CaptureError, match="shift"):
        watch.check(module)


def summing(num: int) -> fx.GraphModule:
    """A reduction that shows what was reduced together: every result is the sum of all."""
    graph = fx.Graph()
    values = [graph.placeholder(f"gradient_{index}") for index in range(num)]
    for value in values:
        value.meta["val"] = torch.empty(1)
    total = values[0]
    for value in values[1:]:
        total = graph.call_function(torch.add, (total, value))
    graph.output([total] * num)
    return fx.GraphModule({}, graph)


def test_a_head_is_reduced_beside_what_its_group_has_added() -> None:
    """As FSDP2 does; the norm's gradient is output 0, the head's output 1."""
    from graphpasses.integrations.torchtitan.stage_sums import HeadReductions, MicrobatchSums

    head, sums = HeadReductions((1,), (0,), summing(1), summing(2)), MicrobatchSums()
    for norms, heads in ((1.0, 10.0), (2.0, 20.0)):
        head.forward(sums)
        gradients = [torch.tensor(norms), torch.tensor(heads)]
        head.backward(gradients)
        assert gradients[1] is None
        sums.add(gradients)
    # With the second microbatch the first one's norm: 1 + 20, for both.
    norm, other = head.add_to([*sums.take([0]), None])
    assert (norm.item(), other.item()) == (21.0 + 2.0, 10.0 + 21.0)
    head.forward(sums)
    head.clear()
    assert head.add_to([None, None]) == [None, None]


class Schedule:
    """Takes microbatches one by one, as torch 2.14's schedules do."""

    def __init__(self, *kinds: str) -> None:
        actions = [SimpleNamespace(computation_type=SimpleNamespace(name=kind)) for kind in kinds]
        self.pipeline_order: dict[int, list[Any]] = {0: [None, *actions]}

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
        ({"streams": True}, "--compile.enable_fsdp_ag_rs_overlap with a pipeline"),
        (
            {"is_chunked": True, "schedule": Schedule("FORWARD", "BACKWARD_WEIGHT")},
            "eager trainer loses the gradient of the norm before lm_head",
        ),
        ({"is_chunked": True, "num_steps": 2}, "a chunked loss with a pipeline and 2 accumulation steps"),
        ({"is_chunked": True}, ""),
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
        gradient_accumulation_steps=changes.get("num_steps", 1),
        config=SimpleNamespace(
            model_spec=SimpleNamespace(name="graph_trainer/qwen3"),
            parallelism=SimpleNamespace(pipeline_parallel_schedule="Interleaved1F1B"),
            compile=SimpleNamespace(
                ep_overlap=SimpleNamespace(enabled=changes.get("ep_overlap", False)),
                enable_fsdp_ag_rs_overlap=changes.get("streams", False),
            ),
        ),
    )
    if not why:
        _refuse_stages(trainer)
        return
    with pytest.raises(UnsupportedError, match=why) as caught:
        _refuse_stages(trainer)
    assert "pipeline_parallel_degree 1" in str(caught.value) or "another --compile" in str(caught.value)
