"""A model that asks whether it is traced is captured on the path that it takes in eager."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphpasses.capture import capture_train_step
from graphpasses.errors import CaptureError
from tests.helpers.models import same_bits

Question = Callable[[torch.Tensor], bool]


def is_compiling(x: torch.Tensor) -> bool:
    return torch.compiler.is_compiling()


def is_dynamo_compiling(x: torch.Tensor) -> bool:
    return torch.compiler.is_dynamo_compiling()


def is_exporting(x: torch.Tensor) -> bool:
    return torch.compiler.is_exporting()


def dynamo_is_compiling(x: torch.Tensor) -> bool:
    import torch._dynamo

    return torch._dynamo.is_compiling() or torch._dynamo.external_utils.is_compiling()


def utils_is_compiling(x: torch.Tensor) -> bool:
    with warnings.catch_warnings(action="ignore"):
        return torch._utils.is_compiling()


def jit_is_tracing(x: torch.Tensor) -> bool:
    return torch.jit.is_tracing() or torch.jit.is_scripting()


def is_non_strict_tracing(x: torch.Tensor) -> bool:
    return torch.compiler._is_non_strict_tracing()


def is_fx_tracing(x: torch.Tensor) -> bool:
    from torch.fx._symbolic_trace import is_fx_symbolic_tracing, is_fx_tracing

    return isinstance(x, torch.fx.Proxy) or is_fx_tracing() or is_fx_symbolic_tracing()


def is_fake_tensor(x: torch.Tensor) -> bool:
    """As transformers 5 asks."""
    from torch._subclasses import FakeTensor

    return isinstance(x, FakeTensor)


def is_fake_tensor_of_its_own_module(x: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def is_attribute(x: torch.Tensor) -> bool:
    return type(x) is torch._subclasses.FakeTensor or issubclass(type(x), torch._subclasses.FakeTensor)


def is_fake(x: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(x)


def detect_fake_mode(x: torch.Tensor) -> bool:
    from torch._guards import detect_fake_mode

    return detect_fake_mode(x) is not None


QUESTIONS: tuple[Question, ...] = (
    is_compiling,
    is_dynamo_compiling,
    is_exporting,
    dynamo_is_compiling,
    utils_is_compiling,
    jit_is_tracing,
    is_non_strict_tracing,
    is_fx_tracing,
    is_fake_tensor,
    is_fake_tensor_of_its_own_module,
    is_attribute,
    is_fake,
    detect_fake_mode,
)


class Asking(nn.Module):
    """Computes otherwise where one of its questions is answered with yes; the hidden layer also in backward."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.question = question
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 1)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu() if self.question(x) else self.inner(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.hidden, x, use_reentrant=False)
        return self.outer(y * 2 if self.question(y) else y)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def bits_of_step(question: Question, step_of: Callable[[nn.Module, torch.Tensor], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, batch = Asking(question), torch.ones(2, 3)
    loss = step_of(model, batch)
    return [loss, *(parameter.grad for parameter in model.parameters())]


def eager(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = loss_fn(model, batch)
    loss.backward()
    return loss.detach()


def captured(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return capture_train_step(loss_fn, model, batch)(batch)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.__name__)
def test_a_model_that_asks_takes_eagers_path(question: Question) -> None:
    expected = bits_of_step(question, eager)
    assert all(map(same_bits, bits_of_step(question, captured), expected))
    other = bits_of_step(lambda x: True, eager)
    assert not any(map(same_bits, other, expected))  # the path that it takes where it is told the truth


def test_torch_is_told_the_truth() -> None:
    """What traces asks, too: the operators of backward carry the line of forward that they belong to."""
    step = capture_train_step(loss_fn, Asking(is_compiling), torch.ones(2, 3))
    assert any(node.meta.get("autograd_backward") for node in step.graph.nodes)


@pytest.mark.parametrize("fails", [False, True])
def test_the_truth_is_back_after_a_capture(fails: bool) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_fn(model, x) if not fails else model(x)

    before = [type(module) for module in (torch.compiler, torch._guards, torch._subclasses)]
    try:
        capture_train_step(loss_of, nn.Linear(3, 1), torch.ones(2, 3))
    except CaptureError:
        assert fails
    with torch._subclasses.FakeTensorMode():
        assert all(question(torch.ones(2)) for question in (is_fake_tensor, is_fake, detect_fake_mode))
    with torch.compiler._non_strict_tracing_context():
        assert is_non_strict_tracing(torch.ones(2))
    assert [type(module) for module in (torch.compiler, torch._guards, torch._subclasses)] == before


def test_a_module_that_is_imported_while_a_step_is_traced_gets_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("from torch._subclasses import FakeTensor")
    monkeypatch.syspath_prepend(tmp_path)
    kept = torch._subclasses.FakeTensor

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        import imported_late

        return loss_fn(model, x) if imported_late.FakeTensor is kept else x

    capture_train_step(loss_of, nn.Linear(3, 1), torch.ones(2, 3))
    assert sys.modules["imported_late"].FakeTensor is kept is torch._subclasses.FakeTensor
