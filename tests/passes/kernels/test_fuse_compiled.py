"""``gp.compile(..., fuse=True)``: compiled graphs have eager's bits, and exact operators are one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import graphpasses
from graphpasses.errors import PipelineError
from graphpasses.fusion import compiled_regions
from graphpasses.fusion.measured import exact_functions
from graphpasses.passes import default_pipeline
from tests.passes.kernels.test_fuse_exactly import Layer, loss_fn

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


class Scaled(nn.Module):
    """Has a kernel in forward, and one in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(62, 62, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.abs() * 0.3 + x.unflatten(-1, (2, x.shape[-1] // 2)).flatten(-2) * y


@pytest.fixture
def kernels() -> Iterator[mock.Mock]:
    """Counts the kernels that are compiled."""
    compile_exactly = compiled_regions.compile_exactly
    with mock.patch.object(compiled_regions, "compile_exactly", side_effect=compile_exactly) as compiled:
        yield compiled


def train(build: Callable[[], nn.Module], batches: list[Tensor], **options: object) -> list[Tensor]:
    """Returns the loss and the gradients of each step, and the trained weights; with no options of eager."""
    torch.manual_seed(0)
    model = build()
    call = graphpasses.compile(model, **options) if options else model  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for batch in batches:
        loss = loss_fn(call, batch)
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(each.detach() for each in model.parameters())]


def batches(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 33, 62, generator=generator).bfloat16() for size in sizes]


@pytest.mark.slow
def test_compiled_graphs_have_eagers_bits(kernels: mock.Mock) -> None:
    given, build = batches(3, 3, 3), partial(Layer, torch.bfloat16)
    report = graphpasses.CompileReport()
    expected = train(build, given)
    found = train(build, given, inner="aot_eager", fuse=True, report=report)
    assert all(map(torch.equal, expected, found))
    for half in ("forward", "backward"):
        passes = report.by_graph[f"graph 0, {half}"]
        assert passes["fuse-exactly"].num_rewrites > 2
        assert " operators run as " in passes["fuse-exactly"].notes[0]
        assert passes.certificate
        assert "exact kernels" in passes.certificate.axioms
    compiled = {node.target for call in kernels.call_args_list for node in call.args[0].__self__.nodes}
    wanted = {torch.ops.aten.silu.default, torch.ops.aten.silu_backward.default}
    exact = exact_functions({(each, torch.bfloat16, "cpu") for each in wanted})  # on this processor
    assert wanted & compiled == {target for target, *_ in exact}  # by the joint graph
    assert torch.ops.aten.silu.default in compiled
    assert kernels.call_count > 6
    torch._dynamo.reset()
    control = train(build, given, inner="inductor")
    assert not all(map(torch.equal, expected, control))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "num_kernels"), [((3, 4, 5, 4), 0), ((4, 4, 4, 5, 5, 4), 4)])
def test_kernels_are_of_sizes_that_come_twice_in_a_row(
    sizes: tuple[int, ...], num_kernels: int, kernels: mock.Mock
) -> None:
    given = batches(*sizes)
    expected, found = train(Scaled, given), train(Scaled, given, inner="aot_eager", fuse=True, dynamic=True)
    assert all(map(torch.equal, expected, found))
    assert kernels.call_count == num_kernels


@pytest.mark.slow
def test_kernels_are_not_made_for_strides_that_no_operator_gives(kernels: mock.Mock) -> None:
    def compute(x: Tensor) -> Tensor:
        return torch.copysign(x.t(), x) * 0.5 + x

    x = torch.randn(64, 64)
    call = graphpasses.compile(compute, inner="aot_eager", fuse=True)
    with pytest.warns(UserWarning, match="gives strides"):
        found = [call(x), call(x)]
    assert all(torch.equal(compute(x), each) for each in found)


def test_what_does_not_go_with_fusion_is_refused() -> None:
    text = (
        "'fuse-exactly' keeps eager's bits, and inner='inductor' fuses otherwise, and rounds; write "
        "inner='aot_eager', or leave it out"
    )
    model = nn.Linear(2, 2)
    with pytest.raises(PipelineError) as error:
        graphpasses.compile(model, fuse=True)
    assert str(error.value) == text
    with pytest.raises(PipelineError) as error:
        torch.compile(model, backend="graphpasses", options={"pipeline": default_pipeline(fuse=True)})
    assert str(error.value) == text
    with pytest.raises(PipelineError, match="option 'fuse' is True or False, got 'all'"):
        torch.compile(model, backend="graphpasses", options={"inner": "aot_eager", "fuse": "all"})
    graphpasses.compile(model, pipeline=default_pipeline(fuse=True), fuse=True, inner="aot_eager")
    graphpasses.compile(model, pipeline=default_pipeline(fuse=True), disable=["fuse-exactly"])
