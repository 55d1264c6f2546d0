"""Whether a captured step still computes what eager computes, on any batch and at any time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphpasses._torch.dtensor import local_part
from graphpasses._torch.fsdp2 import fsdp_groups, reshard
from graphpasses._torch.fsdp2_accumulation import accumulators_restored
from graphpasses._torch.storage import freed_memory_returned
from graphpasses.capture.oracle import Results, is_comparable, run_step
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph import CapturedStep
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.graph.returned import loss_of
from graphpasses.graph.several_models import first_model
from graphpasses.identity import containers_with_copies, same_bits
from graphpasses.identity import put_back as give_items_back
from graphpasses.state.left_tensors import with_gradients
from graphpasses.state.optimizers import is_number
from graphpasses.state.slots import values_restored


@freed_memory_returned()
def check_on_batch(loss_fn: Callable[..., Any], step: CapturedStep, batch: Sequence[Any]) -> None:
    """Runs eager and then the step on one batch, compares all that they leave behind, and puts everything back."""
    if not is_comparable(step.model):
        raise CaptureError(
            "step.check compares bits, and eager's may differ from the step's without a fault: SimpleFSDP's own "
            "reductions before the passes, operators on a GPU without torch.use_deterministic_algorithms(True), or a "
            "fake process group. Check a model that fully_shard has sharded, or an unsharded one"
        )
    consensus = RankConsensus.of_graph(step.graph, next(nn.Module.parameters(step.model)).device)
    another = FidelityError("on another rank, the step differs from eager; its message says where")
    agreed = partial(consensus.raised_together, another)
    with agreed():
        # Before eager runs, since hooks that came since the capture may keep something.
        current, *_ = step.fitting(*batch)
        if step.update is not None:
            step.update.optimizers.check()
        given = partial(current.batch_structure.fresh, batch)
        theirs = _results(step, current, batch, lambda: run_eagerly(loss_fn, step, given()))
    with agreed():
        ours = _results(step, current, batch, lambda: step.run(*given()))
    with agreed():
        if (found := find_difference(theirs, ours)) is not None:
            raise FidelityError(
                f"the captured step computes another {found}. Something changed since the capture that a step cannot "
                "see (see the limits in the documentation); capture the step again"
            )


def find_difference(theirs: Results, ours: Results) -> str | None:
    """Says which result of eager has other bits than ours, or is there on one side alone; None if none has."""
    for name in {**theirs, **ours}:
        one, other = theirs.get(name), ours.get(name)
        if one is None or other is None or not same_bits(one, other):
            return f"{name} than eager on this batch: {_text(other)}, eager {_text(one)}"
    return None


def run_eagerly(loss_fn: Callable[..., Any], step: CapturedStep, batch: Sequence[Any]) -> Any:
    """Does on a batch, which is its own, what a step captured, its update too; returns what ``loss_fn`` returns."""
    with torch.enable_grad():
        result = loss_fn(first_model(step.model), *batch)
        loss_of(result).backward()
    step.grad_norm = None if step.update is None or step.waits else step.update.run_eagerly()
    return result


def _results(step: CapturedStep, current: CapturedStep, batch: Sequence[Any], run: Callable[[], Any]) -> Results:
    """Returns copies of all that a run leaves behind, which is put back; a call would run ``current``."""
    with put_back(current, batch):
        results = run_step(step.model, run, current.snapshot.outside_model)
        if step.grad_norm is not None:
            results["the norm of the gradients"] = step.grad_norm
        reshard(fsdp_groups(step.model))
        results |= _tensors(current, batch)
        return copies_of(results | state_in_optimizers(step.model, _optimizers(step)))


def copies_of(results: Results) -> Results:
    """Returns copies of this rank's parts."""
    return {name: local_part(value).clone() for name, value in results.items() if value is not None}


def state_in_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> Results:
    """Returns the tensors that optimizers keep of a model's parameters, and their numbers, by what they are."""
    kept = {
        f"optimizer state {name!r} of {fqn!r}": value
        for fqn, parameter in model.named_parameters()
        for optimizer in optimizers
        for name, value in optimizer.state.get(parameter, {}).items()
    }
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            kept |= {
                f"{name!r} of group {index} of {type(optimizer).__name__}": value for name, value in group.items()
            }
    kept = {name: torch.tensor(value, device="cpu") if is_number(value) else value for name, value in kept.items()}
    return {name: value for name, value in kept.items() if isinstance(value, torch.Tensor)}


@contextmanager
def put_back(step: CapturedStep, batch: Sequence[Any]) -> Iterator[None]:
    """Puts back what is written in place: tensors, an optimizer's state, the states of generators, and what waits."""
    generators = [(each, each.get_state()) for each in _constants(step) if isinstance(each, torch.Generator)]
    try:
        with (
            values_put_back(step.model, _tensors(step, batch).values(), _optimizers(step)),
            values_restored(step.snapshot.outside_model),
            accumulators_restored(step.model, copied=True),
        ):
            yield
    finally:
        for generator, drawn in generators:
            generator.set_state(drawn)


def states_of(optimizers: Iterable[Optimizer]) -> list[Any]:
    """Returns what is in the states of optimizers, of each parameter, or of them all."""
    states = (state for of in optimizers for state in of.state.values())
    return [value for state in states for value in (state.values() if isinstance(state, dict) else [state])]


@contextmanager
def values_put_back(
    model: nn.Module, tensors: Iterable[torch.Tensor], optimizers: Collection[Optimizer]
) -> Iterator[None]:
    """Puts back what is written into tensors, into a model's gradients, and into state and groups of optimizers."""
    kept = [each for of in optimizers for each in (of.state, *of.state.values(), *of.param_groups)]
    items = [pair for each in kept for pair in containers_with_copies(each)]
    every: list[Any] = [*tensors, *(each.grad for each in with_gradients(model))]
    every += states_of(optimizers)
    before = [(local, local.clone()) for local in map(local_part, every) if isinstance(local, torch.Tensor)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                if not same_bits(tensor, value):
                    tensor.copy_(value)
        for container, copy in items:
            give_items_back(container, copy)


def _optimizers(step: CapturedStep) -> tuple[Optimizer, ...]:
    return () if step.update is None else step.update.optimizers.each


def _tensors(step: CapturedStep, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Returns what a step reads and may write, by name."""
    model = step.model
    tensors: dict[str, Any] = {f"parameter {fqn!r}": each for fqn, each in model.named_parameters()}
    tensors |= {f"buffer {fqn!r}": each for fqn, each in model.named_buffers()}
    tensors |= dict(zip(step.batch_structure.paths, step.batch_structure.leaves(batch), strict=True))
    tensors |= dict(zip(step.carried.paths, step.carried.read(), strict=True))
    constants = [each for each in _constants(step) if isinstance(each, torch.Tensor)]
    tensors |= {f"tensor {index} from outside": each for index, each in enumerate(constants)}
    return {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}


def _constants(step: CapturedStep) -> list[Any]:
    nodes = step.graph.find_nodes(op="get_attr")
    return [*{id(value): value for value in (getattr(step.module, str(n.target)) for n in nodes)}.values()]


def _text(value: torch.Tensor | None) -> str:
    if value is None:
        return "none"
    return str(value.item()) if value.dim() == 0 else f"a tensor {[*value.shape]} {value.dtype}"
