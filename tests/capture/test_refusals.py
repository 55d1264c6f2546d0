"""What a captured step would train otherwise than eager is refused by name: at the capture, or at the call."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step
from graphpasses.errors import BatchMismatchError, CaptureError
from graphpasses.graph import CapturedStep

X = torch.arange(8.0).view(2, 4)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4))


def captured(model: nn.Module | None = None) -> CapturedStep:
    return capture_train_step(loss_fn, build() if model is None else model, X, recapture=False)


def refused(call: Callable[[], Any], kind: type[Exception] = CaptureError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def without_line(message: str) -> str:
    """Returns a message without the number of a line, and without its folder."""
    line = re.search(rf"\({re.escape(__file__)}:\d+ in ", message)
    assert line, message
    return message.replace(line[0], "(test_refusals.py in ")


class Wrapper(nn.Module):
    """Has a property in place of a submodule that went, as PEFT's wrapper of trained tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.original = self.adapter = nn.Linear(4, 4)  # type: ignore[misc]
        self.original = None  # type: ignore[misc]

    @property
    def original(self) -> nn.Module:
        return self.adapter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.original(x).relu()


# ---- models that train in hooks ------------------------------------------------------------------------


def compiled_in_place() -> nn.Module:
    model = build()
    model[2].compile(backend="eager")
    return model


def named_like_a_method(model: nn.Sequential) -> nn.Module:
    model.parameters = model[0]  # type: ignore[assignment, method-assign]
    return model


WRAPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP": (
        lambda: nn.ModuleDict({"tower": DistributedDataParallel(build())}),
        """\
module 'tower' is a DistributedDataParallel, which reduces gradients in hooks that a captured step does not run: \
each rank would train on its own. Capture its .module, with FSDP2's replicate or fully_shard, or use \
torch.compile(model, backend='graphpasses')""",
    ),
    "replicate": (
        lambda: nn.Sequential(replicate(build())),
        """\
module '0' was given to replicate(), which reduces gradients in DistributedDataParallel's hooks, and a captured step \
does not run these: each rank would train on its own. Take FSDP2's, of \
torch.distributed._composable.replicate_with_fsdp, or fully_shard""",
    ),
    "DP": (
        lambda: nn.DataParallel(build()),
        """\
the model is a DataParallel, which copies itself at each call; capture its .module, one process a device""",
    ),
    "FSDP1": (
        lambda: FullyShardedDataParallel(build(), device_id=torch.device("cpu")),
        """\
the model is a FullyShardedDataParallel (FSDP1), which gathers and reduces in hooks that a captured step does not \
run; shard the plain model with fully_shard""",
    ),
    "scripted": (
        lambda: torch.jit.trace(build(), X),
        "the model was made by torch.jit, whose code a trace does not see; capture the module it was made of",
    ),
    "compiled": (
        lambda: torch.compile(build(), backend="eager"),
        "the model is compiled; capture the module that torch.compile was given, before it is compiled",
    ),
    "named like a method": (
        lambda: named_like_a_method(build()),
        "the model has a submodule 'parameters', but under this name a method, or else; give the submodule another",
    ),
    "compiled in place": (
        compiled_in_place,
        "module '2' is compiled; capture the module that torch.compile was given, before it is compiled",
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_models(name: str) -> None:
    make, message = WRAPPED[name]
    with fake_process_group(4):
        model = make()
        assert refused(lambda: captured(model)) == message


def test_a_property_under_the_name_of_no_submodule() -> None:
    torch.manual_seed(0)
    eager = Wrapper()
    model = copy.deepcopy(eager)
    step, loss = captured(model), loss_fn(eager, X)
    loss.backward()
    assert torch.equal(step(X), loss)
    pairs = zip(eager.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
    assert not torch.equal(step(X + 1), loss)


# ---- changed since the capture -------------------------------------------------------------------------


def freeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)


def tie(model: nn.Module) -> None:
    model[2].weight = model[0].weight


def transpose(model: nn.Module) -> None:
    """Autograd chooses the formula of ``mm`` by strides."""
    model[0].weight.data = model[0].weight.data.t()


def add_hook(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nn.Module.eval, "'training' was True {was}False now"),
        (lambda model: model[1].eval(), "'1.training' was True {was}False now"),
        (
            freeze,
            "parameter '0.weight' had requires_grad=True when the step was captured, and has False now",
        ),
        (tie, "'0.weight' and '2.weight' were two parameters when the step was captured, and are one now"),
        (nn.Module.double, "'0.weight' was torch.float32[4, 4] on cpu {was}torch.float64[4, 4] on cpu now"),
        (
            lambda model: model[2].bfloat16(),
            "'2.weight' was torch.float32[4, 4] on cpu {was}torch.bfloat16[4, 4] on cpu now",
        ),
        (
            lambda model: model.to("meta"),
            "'0.weight' was torch.float32[4, 4] on cpu {was}torch.float32[4, 4] on meta now",
        ),
        (
            transpose,
            "'0.weight' was {kind}, strides [4, 1] {was}{kind}, strides [1, 4] now",
        ),
        (add_hook, "'0.hooks' was () {was}(7) now"),
        (
            lambda model: model.append(nn.ReLU()),
            "the model had 4 modules when the step was captured, and has 5 now",
        ),
    ],
)
def test_changes_after_the_capture(change: Callable[[nn.Module], Any], message: str) -> None:
    model = build()
    step = captured(model)
    step(X)
    change(model)
    message = message.replace("{was}", "when the step was captured, and is ")
    message = message.replace("{kind}", "torch.float32[4, 4] on cpu")
    message = message.replace("(7)", f"({next(iter(model[0]._forward_hooks), 0)})")
    assert refused(lambda: step(X)) == f"{message}; capture the step again, or undo the change"


def test_a_trained_buffer() -> None:
    """Not one that forward leaves with its history, as a statistic of the batch."""
    model = nn.Sequential(nn.BatchNorm1d(4))
    step = captured(model)
    model[0].running_mean = model(X).sum(0)
    step(X)
    model[0].running_mean = torch.zeros(4, requires_grad=True)
    assert refused(lambda: step(X)) == (
        "buffer '0.running_mean' had requires_grad=False when the step was captured, and has True now; capture the "
        "step again, or undo the change"
    )


def test_an_untied_weight() -> None:
    model = build()
    tie(model)
    step = captured(model)
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    assert refused(lambda: step(X)).startswith("'0.weight' and '2.weight' were one tensor when the step was captured")


def test_what_was_changed_back_goes_on() -> None:
    model, eager = build(), build()
    step = captured(model)
    model.eval()
    model.train()
    assert torch.equal(step(X), loss_fn(eager, X))


# ---- what forward leaves behind ------------------------------------------------------------------------


class Caching(nn.Linear):
    """Keeps its output for the next call, and counts its calls."""

    last: list[torch.Tensor] | None = None
    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.last is not None:
            x = x + self.last[0]
        self.last = [super().forward(x)]
        return self.last[0]


def test_a_tensor_that_forward_keeps() -> None:
    model = nn.Sequential(Caching(4, 4))
    message = refused(lambda: captured(model))
    assert message.startswith(
        "the step reads at its next call what it keeps in '0.last[0]', a tensor with its history, into which eager's "
    )
    assert model[0].last is None
    assert model[0].num_calls == 0


OUTSIDE = torch.ones(4, 4)


class Averaging(nn.Linear):
    """Keeps a moving average of its weight, or of another tensor's values, in a way that a hook is given."""

    def __init__(self, average: Callable[[Any, torch.Tensor], None]) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.register_buffer("ema", self.weight.detach().clone())
        self.register_forward_hook(lambda module, args, out: average(module, out))


def assign(module: Any, out: torch.Tensor) -> None:
    module.ema.data = OUTSIDE


def set_memory(module: Any, out: torch.Tensor) -> None:
    with torch.no_grad():
        module.ema.set_(module.ema * 2)


def write(module: Any, out: torch.Tensor) -> None:
    module.ema.data.mul_(0.9).add_(module.weight.data, alpha=0.1)


def test_memory_that_stays() -> None:
    """``.data = tensor.data.to(device)`` gives a tensor no other memory on the device where it is."""
    model = nn.Sequential(Averaging(lambda module, _: setattr(module.ema, "data", module.ema.data.to("cpu"))))
    capture_train_step(loss_fn, model, X, recapture=False).check(X)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("average", "what", "how"),
    [
        (assign, "'0.ema'", "with .data = ... at {file}:{line} in assign"),
        (set_memory, "a tensor", "with aten.set_.source_Tensor"),
    ],
)
def test_a_tensor_that_gets_other_memory(
    average: Callable[[Any, torch.Tensor], None], what: str, how: str, check: bool
) -> None:
    line = average.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError) as error:
        capture_train_step(loss_fn, nn.Sequential(Averaging(average)), X, check=check, recapture=False)
    assert str(error.value) == (
        f"{what} gets other memory while loss_fn runs, {how.format(file=__file__, line=line)}. A captured step would "
        "not follow: it would read and write the old memory. Write the tensor in place, e.g. with tensor.copy_(...) "
        "under torch.no_grad(); if only the first call does so, run it before the capture"
    )
    torch.ones(1).data = torch.ones(2)  # as ever


def test_an_average_in_place_is_eagers() -> None:
    model, eager = (nn.Sequential(Averaging(write)) for _ in range(2))
    step = captured(model)
    for _ in range(2):
        loss_fn(eager, X).backward()
        step(X)
        for each in (model, eager):
            torch.optim.SGD(each.parameters(), 0.1).step()
    assert torch.equal(model[0].ema, eager[0].ema)
    assert not torch.equal(model[0].ema, Averaging(write).ema)


class Converting(nn.Linear):
    """Converts itself to another type, and back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(torch.float64).to(torch.float32)
        return super().forward(x)


def test_a_module_that_forward_converts() -> None:
    assert refused(lambda: captured(nn.Sequential(Converting(4, 4)))) == (
        "forward converts or moves a module, as .to() and .half() do, which replaces its parameters: "
        "_apply(): Couldn't swap Converting.weight. Do it before the step"
    )


# ---- batches and gradients -----------------------------------------------------------------------------


def test_a_batch_that_requires_a_gradient() -> None:
    message = (
        "batch[0] requires a gradient, which a captured step does not compute; detach it, or make it a parameter of "
        "the model"
    )
    x = X.clone().requires_grad_()
    assert refused(lambda: capture_train_step(loss_fn, build(), x, recapture=False), BatchMismatchError) == message
    step = captured()
    assert refused(lambda: step(x), BatchMismatchError) == message


# ---- communication -------------------------------------------------------------------------------------


def test_collectives_in_place() -> None:
    def told(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model, x)
        dist.broadcast(loss.detach(), src=0)
        return loss

    with fake_process_group(4):
        assert refused(lambda: capture_train_step(told, build(), X, recapture=False)) == (
            "loss_fn communicates in place: c10d.broadcast_.default. A graph has no wait for it, so what it brings "
            "could be read too early. Call all_reduce, all_gather, all_gather_into_tensor, reduce_scatter, "
            "reduce_scatter_tensor, all_to_all_single or scatter of torch.distributed, without async_op, "
            "or communicate before or after the step"
        )


def test_a_branch_that_reads_parameters_by_a_variable() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: model(x) * 2, lambda x: model(x) * 3, (x,)).sum() + loss_fn(model, x)

    assert "as torch.cond, that reads a tensor by a variable" in refused(
        lambda: capture_train_step(loss, build(), X, check=False, recapture=False)
    )


# ---- sparse gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(kind: Callable[..., nn.Module]) -> None:
    ids = torch.tensor([[1, 2], [2, 3]])
    model = nn.Sequential(kind(5, 4, sparse=True), nn.Linear(4, 2))
    assert refused(lambda: capture_train_step(loss_fn, model, ids, recapture=False)) == (
        "the gradient of '0.weight' is sparse, and a captured step fills dense ones; make the embedding with "
        "sparse=False"
    )
    model[0].sparse = False
    capture_train_step(loss_fn, model, ids, recapture=False)(ids)
    assert model[0].weight.grad is not None
