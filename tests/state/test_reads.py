"""A captured step has the attributes that forward read built in: it refuses that they change."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.errors import CaptureError
from graphpasses.graph import CapturedStep
from tests.helpers.models import same_bits

X = torch.arange(8.0).view(2, 4)
GONE = (
    "the model has no parameter or buffer '0.linear.bias' any more; the captured step reads it. Capture the step "
    "again after changing the model"
)
AGAIN = "; capture the step again, or undo the change"


class Config:
    """What modules share, as transformers' configurations are."""

    def __init__(self) -> None:
        self.use_scale = True
        self.scaling = {"factor": 2.0}


class Block(nn.Module):
    """Reads attributes of many kinds, and sets none that it reads."""

    default = 1.5

    def __init__(self, config: Config, scale: float = 2.0) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), config
        self.scaled = lambda x: x * scale
        self.activation = functional.relu
        self.sizes = [1, 2]
        self.dtype = torch.float32
        self.shift = torch.ones(4)
        self.num_logged, self.seen = 0, None

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = tuple(x.shape)
        y = self.scaled(self.activation(self.linear(x.to(self.dtype)))) + self.shift
        if self.config.use_scale:
            y = y * self.config.scaling["factor"] * self.sizes[1]
        if getattr(self, "halved", False):
            y = y / 2
        return y * self.default + self.num_parameters * len(self.seen)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    config = Config()
    return nn.Sequential(Block(config), nn.Dropout(0.0), Block(config))


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(CaptureError) as caught:
        call()
    return str(caught.value)


def was(path: str, before: str, now: str) -> str:
    return f"{path!r} was {before} when the step was captured, and is {now} now"


def set_attribute(index: int, name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model[index], name, value)


CHANGES: list[tuple[Callable[[nn.Module], Any], str]] = [
    (set_attribute(1, "p", 0.9), was("1.p", "0.0", "0.9")),
    (set_attribute(1, "p", -0.0), was("1.p", "0.0", "-0.0")),
    (lambda model: model.__setitem__(1, nn.Dropout(0.9)), was("1.p", "0.0", "0.9")),
    (
        lambda model: model.__setitem__(0, Block(model[2].config, 3.0)),
        "'0.scaled' is another object now",
    ),
    (set_attribute(1, "inplace", 0), was("1.inplace", "False", "0")),
    (set_attribute(0, "dtype", torch.bfloat16), was("0.dtype", "torch.float32", "torch.bfloat16")),
    (set_attribute(0, "default", 2.5), was("0.default", "1.5", "2.5")),
    (set_attribute(2, "halved", True), was("2.halved", "absent", "True")),
    (lambda model: delattr(model[0], "dtype"), was("0.dtype", "torch.float32", "absent")),
    (lambda model: model[0].sizes.append(3), was("0.sizes", "[1, 2]", "[1, 2, 3]")),
    (lambda model: setattr(model[2].config, "use_scale", False), was("0.config.use_scale", "True", "False")),
    (
        lambda model: model[2].config.scaling.update(factor=4.0),
        was("0.config.scaling['factor']", "2.0", "4.0"),
    ),
    (
        set_attribute(0, "activation", functional.gelu),
        was("0.activation", "relu", "gelu"),
    ),
    (
        set_attribute(2, "shift", torch.zeros(4)),
        "'2.shift' is another object now",
    ),
    (
        set_attribute(2, "forward", lambda x: x),
        was("2.forward", "None", "<lambda>"),
    ),
    (
        lambda model: setattr(model[1], "__class__", nn.ReLU),
        was("1.__class__", "Dropout", "ReLU"),
    ),
    (
        lambda model: setattr(model[0].linear, "bias", None),
        GONE,
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_changes_after_the_capture(change: Callable[[nn.Module], Any], message: str) -> None:
    model = build()
    step = capture_train_step(loss_fn, model, X, recapture=False)
    expected = step(X)
    change(model)
    assert refused(lambda: step(X)).removesuffix(AGAIN) == message
    other = build()
    change(other)
    if message != GONE:  # a model that was built so is not the captured one, either
        assert refused(lambda: step.for_model(other)).removesuffix(AGAIN) == message
    assert expected.isfinite()


def test_a_parameter_where_there_was_none() -> None:
    model = nn.Linear(4, 4, bias=False)
    step = capture_train_step(loss_fn, model, X, recapture=False)
    model.bias = nn.Parameter(torch.ones(4))
    assert refused(lambda: step(X)) == "'bias' was None when the step was captured, and is not now" + AGAIN


@pytest.mark.parametrize(
    "change",
    [
        set_attribute(0, "num_logged", 7),
        set_attribute(0, "seen", (9, 9)),
        set_attribute(0, "unknown", "x"),
        set_attribute(1, "p", float("0.0")),
        lambda model: model.__setitem__(1, nn.Dropout(0.0)),
        lambda model: setattr(model[0], "sizes", [1, 2]),
        lambda model: setattr(model[0], "config", copy.deepcopy(model[0].config)),
        lambda model: model[0].shift.add_(0.0),
    ],
)
def test_changes_that_forward_does_not_see(change: Callable[[nn.Module], Any]) -> None:
    model, eager = build(), build()
    step = capture_train_step(loss_fn, model, X, recapture=False)
    for each in (model, eager):
        change(each)
    assert same_bits(step(X), loss_fn(eager, X).detach())


def test_eager_calls_between() -> None:
    model = build()
    step = capture_train_step(loss_fn, model, X, recapture=False)
    assert model[0].seen is None
    expected = step(X)
    loss_fn(model, X[:1]).backward()
    assert same_bits(step(X), expected)


def test_a_step_for_a_model_with_functions_and_tensors_of_its_own() -> None:
    model, other = build(), build()
    other[0].activation = types.FunctionType(functional.relu.__code__, functional.relu.__globals__)
    other[0].activation.__defaults__ = functional.relu.__defaults__
    step = capture_train_step(loss_fn, model, X, recapture=False).for_model(other)
    assert same_bits(step(X), loss_fn(model, X).detach())
    other[0].activation = functional.gelu
    assert refused(lambda: step(X)).startswith("'0.activation' was relu when")


# ---- what forward changes itself -----------------------------------------------------------------------


class Changing(nn.Linear):
    """Changes an attribute that it has read."""

    def __init__(self, change: Callable[[Any], Any], value: Any = 0) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.change, self.value = change, value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, self.value = self.value, self.change(self.value)
        return super().forward(x) * 2 if value == "first" else super().forward(x)


def test_a_flag_that_changes_at_each_call() -> None:
    model = nn.Sequential(Changing(lambda value: not value, False))
    assert refused(lambda: capture_train_step(loss_fn, model, X, recapture=False)) == (
        "forward reads attribute '0.value' and changes it at each call (False, True, False), and a captured step "
        "would not. Keep it in a buffer that forward writes in place, or set it outside"
    )
    assert model[0].value is False


class LeavesOtherwise(nn.Sequential):
    """Leaves its dropout in another mode than it found it in, or its weight untrained."""

    def __init__(self, leave: Callable[[nn.Module], object]) -> None:
        super().__init__(nn.Linear(4, 4), nn.Dropout())
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x)
        self.leave(self)
        return result


def test_a_mode_and_a_parameter_that_forward_leaves_otherwise() -> None:
    model = LeavesOtherwise(lambda self: self[1].eval())
    assert refused(lambda: capture_train_step(loss_fn, model, X, recapture=False)) == (
        "forward changes attribute '1.training' (True, False) and computes otherwise from then on; a captured step "
        "would not. Run forward once before the capture"
    )
    capture_train_step(loss_fn, LeavesOtherwise(lambda self: self[1].eval().train()), X, recapture=False)
    model = LeavesOtherwise(lambda self: self[0].weight.requires_grad_(False))
    assert refused(lambda: capture_train_step(loss_fn, model, X, recapture=False)) == (
        "loss_fn sets requires_grad of '0.weight'; set it before the capture"
    )


def test_a_flag_that_decides() -> None:
    model = nn.Sequential(Changing(lambda value: "later", "first"))
    assert refused(lambda: capture_train_step(loss_fn, model, X, recapture=False)) == (
        "forward changes attribute '0.value' ('first', 'later') and computes otherwise from then on; a captured step "
        "would not. Run forward once before the capture"
    )
    model(X)
    step = capture_train_step(loss_fn, model, X, recapture=False)
    assert same_bits(step(X), loss_fn(model, X).detach())


def captured_once_set() -> tuple[nn.Module, CapturedStep]:
    model = nn.Sequential(Changing(lambda value: "set", None))
    return model, capture_train_step(loss_fn, model, X, recapture=False)


def test_what_forward_sets_once() -> None:
    model, step = captured_once_set()
    assert model[0].value is None
    expected = loss_fn(copy.deepcopy(model), X).detach()
    assert same_bits(step(X), expected)
    model(X)
    assert model[0].value == "set"
    assert same_bits(step(X), expected)
    model[0].value = "first"
    assert refused(lambda: step(X)) == was("0.value", "None", "'first'") + AGAIN


class NotesItsTask(Block):
    """Notes in the config, which all modules share, what its first batch was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.problem_type is None:
            self.config.problem_type = "regression"
        return super().forward(x)


def test_what_forward_sets_once_in_a_shared_config() -> None:
    def build_one() -> nn.Module:
        config = Config()
        config.problem_type = None
        torch.manual_seed(0)
        return nn.Sequential(NotesItsTask(config))

    model, other = build_one(), build_one()
    step = capture_train_step(loss_fn, model, X, recapture=False)
    theirs = step.for_model(other)
    assert other[0].config.problem_type is None
    expected = loss_fn(build_one(), X).detach()
    assert same_bits(step(X), expected)
    assert same_bits(theirs(X), expected)
    loss_fn(other, X)
    assert same_bits(theirs(X), expected)
    other[0].config.problem_type = "classification"
    assert refused(lambda: theirs(X)) == was("0.config.problem_type", "None", "'classification'") + AGAIN


def test_a_step_for_a_model_that_simple_fsdp_wrapped_with_classes_of_its_own() -> None:
    def wrapped(dtype: torch.dtype) -> nn.Module:
        return simple_fsdp(build(), dist.init_device_mesh("cpu", (2,)), param_dtype=dtype)

    with fake_process_group(2):
        model, alike, other = map(wrapped, (torch.float32, torch.float32, torch.bfloat16))
        assert type(model[0].linear) is not type(alike[0].linear)
        step = capture_train_step(loss_fn, model, X, recapture=False)
        assert step.for_model(alike).model is alike
        assert refused(lambda: step.for_model(other)) == ("'0.linear.__class__' is another object now" + AGAIN)


def test_a_step_for_a_model_with_parametrizations_of_its_own() -> None:
    model, other = build(), build()
    for each in (model, other):
        nn.utils.parametrizations.weight_norm(each[0].linear)
    step = capture_train_step(loss_fn, model, X, recapture=False)
    assert same_bits(step.for_model(other)(X), step(X))


class Proxy:
    """Says that it is of another class, which it reads of itself, as proxies of data loaders do."""

    def __init__(self) -> None:
        self.of, self.scale = Config(), 2.0

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.of)


def test_an_object_that_reads_itself_to_say_its_class() -> None:
    proxy, model = Proxy(), build()
    step = capture_train_step(lambda model, x: proxy.scale * model(x).sum(), model, X, recapture=False)
    proxy.scale = 3.0
    assert refused(lambda: step(X)).startswith("'proxy.scale' was 2.0 when the step was captured, and is 3.0 now")
