"""A step whose exact operators run as compiled kernels has the bits of the step without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpasses._torch.exact_kernels import compile_exactly
from graphpasses.agreement import CollectiveSequence
from graphpasses.capture import capture_train_step
from graphpasses.errors import PipelineError
from graphpasses.fsdp import BucketPlan
from graphpasses.fusion import compiled_regions
from graphpasses.graph import CapturedStep, TrainGraph
from graphpasses.graph.nodes import EXACT_REGION
from graphpasses.passes import FuseExactly, default_pipeline
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline

aten = torch.ops.aten
NO_BUCKETS = BucketPlan.from_modules([])


class Layer(nn.Module):
    """SwiGLU with a rotation and a norm, of odd sizes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(62, dtype=dtype)
        self.gate, self.up = (nn.Linear(62, 85, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(85, 62, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        a, b = y.chunk(2, -1)
        y = y * 0.3 + torch.cat((-b, a), -1) * 0.7
        return x + self.down(F.silu(self.gate(y)) * self.up(y)) / 3


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def captured(dtype: torch.dtype, pipeline: Pipeline, *, prove: bool = True) -> CapturedStep:
    torch.manual_seed(0)
    model = Layer(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x = torch.zeros(3, 33, 62, dtype=dtype)
    captured = capture_train_step(loss_fn, model, x, optimizer=optimizer)
    return pipeline.run(captured, prove=prove)


def train(step: CapturedStep, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    losses = [step(torch.randn(3, 33, 62, generator=generator).to(dtype)) for _ in range(4)]
    return [*losses, *(parameter.detach() for parameter in step.model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_have_the_same_bits(dtype: torch.dtype) -> None:
    plain, fused = (captured(dtype, default_pipeline(NO_BUCKETS, fuse=fuse)) for fuse in (False, True))
    expected, found = train(plain, dtype), train(fused, dtype)
    assert all(map(torch.equal, expected, found))
    assert fused.report is not None
    report = fused.report["fuse-exactly"]
    assert report.num_rewrites > 3
    assert " operators run as " in report.notes[0]
    assert fused.report.certificate
    assert "exact kernels" in fused.report.certificate.axioms
    assert len(fused.remembered[EXACT_REGION]) > 3  # kernels that ran
    lerp = next(node for node in fused.graph.nodes if node.target is torch.ops.aten._foreach_lerp_.Scalar)
    assert (EXACT_REGION in lerp.meta) is (dtype is torch.float32)


def test_without_kernels_none_are_taken_for_granted() -> None:
    plain = captured(torch.float32, default_pipeline(NO_BUCKETS))
    assert plain.report is not None
    assert plain.report.certificate is not None
    assert "exact kernels" not in plain.report.certificate.axioms


@pytest.mark.slow
def test_a_kernel_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    step = capture_train_step(
        lambda model, x: (model(x) * 2 + 1).square().mean(), nn.Linear(64, 64, dtype=torch.bfloat16), x
    )
    step = Pipeline((FuseExactly(),)).run(step)

    def without_casts(function: object, inputs: list[Tensor]) -> object:
        return compile_exactly(lambda *given: [x + 1 for x in function(*given)], inputs)  # type: ignore[operator]

    monkeypatch.setattr(compiled_regions, "compile_exactly", without_casts)
    with pytest.raises(PipelineError, match="has other bits than eager's: result 0 has"):
        step(x)


@dataclass(frozen=True)
class MoveApart(GraphPass):
    """Puts a call between those of a kernel."""

    name: ClassVar[str] = "move-apart"
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def rewrite(self, graph: TrainGraph) -> int:
        first = next(node for node in graph.graph.nodes if EXACT_REGION in node.meta)
        with graph.graph.inserting_before(first.next):
            graph.emit(torch.ops.aten.neg.default, (first,), like=first)
        read = next(user for user in first.users if EXACT_REGION in user.meta)
        read.replace_input_with(first, first.next)
        return 1


def test_calls_that_were_moved_apart_are_refused() -> None:
    step = captured(torch.float32, Pipeline((FuseExactly(), MoveApart())), prove=False)
    with pytest.raises(PipelineError, match="let 'fuse-exactly' be the last pass of the pipeline"):
        train(step, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [True, False])
def test_functions_are_fused_where_all_ranks_have_eagers_bits(
    is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = captured(torch.bfloat16, Pipeline(()))
    monkeypatch.setattr(CollectiveSequence, "agree", lambda self, _, flags: [is_exact and flag for flag in flags])
    step = Pipeline((FuseExactly(),)).run(step)
    silu = next(node for node in step.graph.nodes if node.target is torch.ops.aten.silu.default)
    assert (EXACT_REGION in silu.meta) is is_exact


@dataclass(frozen=True)
class MarkAll(GraphPass):
    """Marks calls for a kernel, whatever they compute."""

    name = "mark-all"
    numerics = Numerics.BITWISE

    targets: tuple[object, ...]

    def rewrite(self, graph: TrainGraph) -> int:
        for node in graph.graph.nodes:
            if node.target in self.targets and len(node.all_input_nodes) == 1:
                node.meta[EXACT_REGION] = 0
        graph.runs_as = compiled_regions.CompiledRegions({})
        return 1


@pytest.mark.parametrize("name", ["sum", "rand_like", "t"])
def test_what_is_not_exact_is_no_part_of_a_kernel(name: str) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) + torch.rand_like(x) * 2).sum()
        return loss

    step = capture_train_step(loss_of, nn.Linear(64, 64), torch.ones(64, 64))
    step = Pipeline((MarkAll((getattr(aten, name).default, aten.mul.Tensor)),)).run(step)
    with pytest.raises(
        PipelineError, match=rf"^{name}\w* is marked as part of an exact kernel, and is not: aten.{name}"
    ):
        step(torch.ones(64, 64))
