"""What Dynamo and AOTAutograd trace has eager's bits where torch alone would round otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.utils import get_donated_idxs
from torch._subclasses.fake_tensor import FakeTensorMode

import graphpasses
from graphpasses._torch.aot_autograd import _donated, _MinCut

pytestmark = pytest.mark.slow


def results(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.manual_seed(0)
    y = call(x)
    y.backward(torch.rand(y.shape, dtype=y.dtype))
    assert x.grad is not None
    return [y.detach(), x.grad]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.addcdiv(x, x, x.exp(), value=0.3),
        lambda x: x.sin().addcmul_(x, x.exp(), value=0.3),
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        lambda x: F.dropout(x.bfloat16().permute(1, 3, 2, 0), 0.3).contiguous(),
        lambda x: x * torch.empty_like(x.mT).bernoulli_(0.5).mT,
        lambda x: F.softplus(x.reshape(10, 21).mul(1).unsafe_chunk(3, 1)[1].mul_(2)),
        lambda x: F.logsigmoid(F.silu(x.flatten()[:80].view(10, 8).mul(1).T)),
        lambda x: (F.dropout(x), x * torch.rand(7))[1],
    ],
    ids=["addcdiv", "addcmul", "bilinear", "dropout", "bernoulli", "written in place", "strides of kernels", "dead"],
)
def test_operators_are_eagers(function: Any, dynamic: bool) -> None:
    eager = results(function)
    assert same(results(graphpasses.compile(function, inner="aot_eager", dynamic=dynamic)), eager)
    assert not same(results(torch.compile(function, backend="aot_eager", dynamic=dynamic)), eager)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
def test_optimizers_are_eagers(optimizer: type[torch.optim.Optimizer]) -> None:
    def trained(compiled: Callable[..., Any], *, is_whole: bool = True) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        update = optimizer(model.parameters())

        def step(x: Tensor) -> None:
            model(x).square().mean().backward()
            if is_whole:
                update.step()

        call, last = compiled(step), update.step if is_whole else compiled(update.step)
        for _ in range(7):
            call(torch.randn(4, 8))
            if not is_whole:
                last()
        return [each.detach() for each in model.parameters()]

    torch.compiler.reset()
    report = graphpasses.CompileReport()
    eager = trained(lambda call: call)
    whole = functools.partial(graphpasses.compile, inner="aot_eager", report=report)
    assert same(trained(whole), eager)
    assert report.num_graphs == 1
    assert same(trained(whole, is_whole=False), eager)
    assert not same(trained(functools.partial(torch.compile, backend="aot_eager")), eager)


def is_traced() -> bool:
    return torch.compiler.is_compiling()


def asks(x: Tensor) -> Tensor:
    return x.sin() if is_traced() else x.cos()


def test_who_asks_whether_it_is_compiled_is_reported() -> None:
    report = graphpasses.CompileReport()
    compiled = results(graphpasses.compile(asks, inner="aot_eager", report=report))
    assert not same(compiled, results(asks))
    (note,) = report.notes
    assert "test_aot_autograd.py" in note
    assert "in asks asks whether it is compiled" in note
    report = graphpasses.CompileReport()
    graphpasses.compile(torch.sin, inner="aot_eager", report=report)(torch.ones(2))
    assert not report.notes


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_functions_of_functions(transform: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return transform(lambda row: row.sin().cumsum(0))(x) * x

    eager = results(function)
    assert same(results(graphpasses.compile(function, inner="aot_eager")), eager)
    assert not same(results(lambda x: function(x) + x), eager)


def test_a_formula_whose_strides_are_not_those_of_its_fake_result() -> None:
    def function(x: Tensor) -> Tensor:
        return F.softplus((x.flatten(0, 1).view(2, 3, 35) * 2).transpose(0, 1)).contiguous()

    eager = results(function)
    assert same(results(graphpasses.compile(function, inner="aot_eager")), eager)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        results(torch.compile(function, backend="aot_eager"))


def gated(x: Tensor, y: Tensor) -> Tensor:
    z = torch.tanh(x * y + x) * y
    return z * z + torch.sigmoid(z)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_functions_of_torch_jit_run_in_their_executor() -> None:
    scripted: Any = torch.jit.script(gated)

    def function(x: Tensor) -> Tensor:
        return scripted(x, x.flip(0))

    *_, eager = [results(function) for _ in range(5)]  # it fuses kernels at its third call
    assert same(results(graphpasses.compile(function, inner="aot_eager")), eager)
    assert not same(results(torch.compile(function, backend="aot_eager")), eager)


ARRAY = np.linspace(-3, 3, 7, dtype=np.float32)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, after a break
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.from_numpy(np.tanh(ARRAY) * np.exp(ARRAY)).mul(np.std(ARRAY)),
        lambda x: (x.sum() * np.cos(0.7) * np.sqrt(7) / np.tanh(0.3)).float(),  # as tensors they make it float64
    ],
)
def test_numpy_computes_what_it_does_in_eager(function: Callable[[Tensor], Tensor]) -> None:
    eager, report = results(function), graphpasses.CompileReport()
    assert same(results(graphpasses.compile(function, inner="aot_eager", report=report)), eager)
    assert "numpy" in report.graph_breaks[0].lower()
    assert not same(results(torch.compile(function, backend="aot_eager")), eager)


def test_numbers_that_vary_are_computed_in_their_order() -> None:
    a, b, c = numbers = [0.1, 0.7, 1.3]

    def function(x: Tensor) -> Tensor:
        return x.double() * (numbers[0] * numbers[1] * numbers[2])

    def steps(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        made = []
        for step in range(5):
            numbers[:] = a * 1.07**step, b * 0.93**step, c + 0.11 * step
            made += results(call)
        return made

    eager, report = steps(function), graphpasses.CompileReport()
    assert same(steps(graphpasses.compile(function, inner="aot_eager", report=report)), eager)
    assert report.num_graphs == 2  # the second is for all numbers
    assert not same(steps(torch.compile(function, backend="aot_eager")), eager)


def test_a_part_of_a_backward_graph_writes_over_nothing_that_stays() -> None:
    """Inductor reuses the memory of saved tensors, which it knows by their positions in the whole graph."""
    context = TracingContext(FakeTensorMode())
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=[1, 2, 3])
    with tracing(context):
        with _donated([0, 2, 3, -1, 1], kept=[3]):
            assert get_donated_idxs() == [1, 4]
        assert get_donated_idxs() == [1, 2, 3]


@pytest.mark.usefixtures("forget_compiled_code")
def test_a_graph_may_be_retained_after_one_that_was_not() -> None:
    """Torch alone raises, since a compiled backward may write over what it reads; ours does not."""
    x = torch.ones(3, requires_grad=True)
    call = graphpasses.compile(lambda x: x.exp().sin().sum(), inner="aot_eager")
    call(x).backward()
    loss = call(x)
    once, twice = (torch.autograd.grad(loss, x, retain_graph=True) for _ in range(2))
    assert torch.equal(*once, *twice)
    assert torch.equal(*once, x.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("forget_compiled_code")
def test_a_transformer_that_nests_what_is_not_masked_is_named() -> None:
    """Where eager evaluates with a mask, what is masked gets zeros, which the compiled encoder computes."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model, report = torch.nn.TransformerEncoder(layer, 1).eval(), graphpasses.CompileReport()
    compiled = graphpasses.compile(model, inner="aot_eager", report=report)
    mask = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        results = [each(torch.ones(2, 3, 8), src_key_padding_mask=mask) for each in (model, compiled)]
    assert not torch.equal(*results)
    (note,) = report.notes
    assert "transformer.py" in note
    assert "asks whether it is compiled" in note


class Counted(_MinCut):
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize("whose", ["ours", "the user's"])
def test_inductor_splits_with_guessed_sizes_or_as_the_user_says(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guessed by expressions, the sizes of a DLRM's lookups take half of the split."""
    split = Counted()
    monkeypatch.setattr("graphpasses._torch.aot_autograd._MinCut", lambda: split)
    with inductor_config.patch(custom_partitioner_fn=Counted() if whose == "the user's" else None):
        results(graphpasses.compile(lambda x: x.exp().sin(), inner="inductor"))
        assert (split.calls, whose) in [(1, "ours"), (0, "the user's")]
