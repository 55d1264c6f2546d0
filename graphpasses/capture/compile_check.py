"""Whether a compiled model computes what eager computes, on any batch and at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphpasses._torch.compile_backend import uncompiled_module
from graphpasses._torch.ddp import orders_buckets
from graphpasses._torch.fsdp2 import fsdp_groups, reshard
from graphpasses._torch.fsdp2_accumulation import accumulators_restored
from graphpasses._torch.operator_facts import read_tensors
from graphpasses._torch.optimizers import optimizers_in_backward
from graphpasses._torch.pytree import tree_leaves, tree_map
from graphpasses._torch.state_dict import ShardedTensor
from graphpasses._torch.storage import freed_memory_returned
from graphpasses._torch.surroundings import never_compiled
from graphpasses.capture.compiled_call import CompiledCall
from graphpasses.capture.oracle import Results, has_equal_bits, run_step
from graphpasses.capture.step_check import copies_of, find_difference, state_in_optimizers, states_of, values_put_back
from graphpasses.embedding.torchrec.ddp_calls import modules_and_lookups
from graphpasses.errors import CaptureError, FidelityError
from graphpasses.graph.rank_consensus import RankConsensus
from graphpasses.graph.returned import loss_of
from graphpasses.identity import attributes_restored


@never_compiled
@freed_memory_returned()
def check_compiled(loss_fn: Callable[..., Any], model: nn.Module, *batch: Any) -> None:
    """Compares forward and backward of a compiled model with eager's on a batch, and leaves the model as it was.

    Eager runs first, under ``torch.compiler.set_stance("force_eager")``, then what is compiled. Loss, gradients,
    parameters, buffers, the state of random numbers and of optimizers that run in backward (TorchRec's fused ones)
    must then have the same bits. It finds what no list of limits has. All ranks must call it together. What
    ``loss_fn`` and hooks keep outside the model's modules, as a history of losses, they keep of both runs.

    Args:
        loss_fn: called as ``loss_fn(model, *batch)``; returns as of :func:`graphpasses.capture_train_step`, and calls
            no ``backward``.
        model: what :func:`graphpasses.compile` returned for a module, or a module with such modules in it.
        batch: what ``loss_fn`` is given behind the model.

    Raises:
        FidelityError: on all ranks: one has other bits; that one's message says which.
        CaptureError: there is nothing to compare: ``loss_fn`` calls nothing that graphpasses compiled, bits may
            differ from run to run, or a DistributedDataParallel has not ordered its buckets yet.

    Example:
        >>> import graphpasses as gp
        >>> model = gp.compile(torch.nn.Linear(4, 1), inner="aot_eager")
        >>> gp.check_compiled(lambda model, x: model(x).mean(), model, torch.ones(2, 4))
    """
    whole = uncompiled_module(model)
    _refuse(whole)
    groups = [dist.group.WORLD.group_name] if dist.group.WORLD is not None else []
    consensus = RankConsensus(groups, next(nn.Module.parameters(whole), torch.empty(0, device="cpu")).device)
    another = FidelityError("on another rank, the compiled model differs from eager; its message says where")
    agreed = partial(consensus.raised_together, another)

    def loss() -> Any:
        with torch.enable_grad():
            result = loss_fn(model, *tree_map(lambda leaf: leaf, batch))
            loss_of(result).backward()
        reshard(fsdp_groups(whole))
        return result

    with agreed(), torch.compiler.set_stance("force_eager"):
        theirs = _results(whole, batch, loss)
    with agreed():
        before = CompiledCall.num_compiled
        ours = _results(whole, batch, loss)
        if CompiledCall.num_compiled == before:
            raise CaptureError("loss_fn calls nothing that graphpasses.compile made; give it the compiled model")
    with agreed():
        if (found := find_difference(theirs, ours)) is not None:
            raise FidelityError(
                f"the compiled model computes another {found}. The limits in the documentation say where "
                'torch.compile does otherwise than eager; with inner="inductor" dense layers may'
            )


def _refuse(model: nn.Module) -> None:
    if not has_equal_bits(model):
        raise CaptureError(
            "check_compiled compares bits, and those of operators on a GPU without "
            "torch.use_deterministic_algorithms(True), or of a fake process group, may differ from run to run"
        )
    for module in modules_and_lookups(model):
        if isinstance(module, nn.parallel.DistributedDataParallel) and orders_buckets(module):
            raise CaptureError(
                f"the DistributedDataParallel around {type(module.module).__name__} orders its buckets as gradients "
                "come in its first steps; train three steps before check_compiled"
            )


def _results(model: nn.Module, batch: Sequence[Any], run: Callable[[], Any]) -> Results:
    """Returns copies of all that a run leaves behind, which is put back."""
    tensors = _tensors(model, batch)
    every = {each for parameter in nn.Module.parameters(model) for each in optimizers_in_backward(parameter)}
    # Of sharded tables it shows what their kernels keep, in buffers of theirs.
    optimizers = [one for one in every if not any(isinstance(each, ShardedTensor) for each in states_of([one]))]
    with (
        values_put_back(model, tensors.values(), optimizers),
        accumulators_restored(model, copied=True),
        attributes_restored(modules_and_lookups(model)),
    ):
        results = run_step(model, run, calls_hooks=True)
        return copies_of(results | tensors | state_in_optimizers(model, optimizers))


def _tensors(model: nn.Module, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Returns the memory that a step may write, by name: of sharded tables, what their kernels hold."""
    fqns = {module: fqn for fqn, module in model.named_modules()}
    given = (each for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) for each in read_tensors(leaf))
    tensors: dict[str, Any] = {f"tensor {index} of the batch": each for index, each in enumerate(given)}
    inside: dict[str, Any] = {}  # of lists and dicts
    for index, module in enumerate(modules_and_lookups(model)):
        owner = fqns.get(module, f"{type(module).__name__} {index}")
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            path = f"{owner}.{name}".lstrip(".")
            tensors[f"tensor {path!r}"] = value
            inside |= {f"tensor {f'{path}[{place}]'!r}": each for place, each in enumerate(tree_leaves(value))}
    whole = ((name, each) for name, each in (tensors | inside).items() if not isinstance(each, ShardedTensor))
    every = {name: each for name, each in whole if isinstance(each, torch.Tensor)}
    first = {id(each): name for name, each in reversed(every.items())}
    return {name: each for name, each in every.items() if first[id(each)] == name}
