"""What tracing TorchRec's input dists brings: ``python -m experiments.torchrec_bench.input_dists``.

A compiled model whose graph holds the input dists ("traced") against one that runs them eagerly before its graph, the
splits of all modules fused as in TorchRec's train pipelines ("before the graph"). Steps in turns; walls are of the
slower rank, CPU seconds the mean of the ranks. A model's input dists can only be run before its graph where the ids
of all modules are known then, as they are here.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

from experiments.harness.interleaved import Rounds, interleave
from experiments.torchrec_bench.workloads import Workload, workloads

Where = Literal["eager", "traced", "before the graph"]
Inner = Literal["inductor", "aot_eager"]

NUM_WARM_UPS = 4
_PRELOAD = ("torchrec.models.dlrm", "torchrec.distributed.model_parallel", "torch._inductor.compile_fx")


@dataclass(frozen=True)
class Received:
    """What the input dists brought, in the place of a batch's ids.

    Args:
        features: by module and sharding keys, values and lengths.
        batch_sizes: of each rank.
        batch_size: this rank's.
    """

    features: Any
    batch_sizes: list[int]
    batch_size: int

    def stride(self) -> int:
        """Returns the number of samples, as a key-jagged tensor does."""
        return self.batch_size


class BeforeTheGraph(nn.Module):
    """A model whose sharded modules look up what their input dists brought, and these input dists.

    Args:
        model: with sharded modules of bags that all take the ids of the batch.
        compile: makes a module a compiled one.
    """

    def __init__(self, model: nn.Module, compile: Callable[[nn.Module], Any]) -> None:
        from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

        super().__init__()
        self.model = model
        self._sharded = [m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection)]
        self._compile, self._compiled = compile, None

    def step(self, dense: Tensor, ids: Any, labels: Tensor) -> Tensor:
        """Returns the loss of a batch."""
        is_first = self._compiled is None
        if is_first:
            self._take_input_dists(ids)
            self._compiled = self._compile(self)
        features, batch_sizes = self._exchange(ids)
        # A tensor's size may vary without a new graph, which a number may not.
        sized = [torch.empty(1).expand(size) for size in batch_sizes]
        if is_first:
            from graphpasses._torch.dynamo import mark_varying

            dense, labels = dense.detach(), labels.detach()
            received = [tensor for kjts in features for _, *tensors in kjts for tensor in tensors]
            for tensor in (dense, labels, *sized, *received):
                mark_varying(tensor)
        return self._compiled(dense, features, sized, labels)

    def forward(self, dense: Tensor, features: Any, sized: list[Tensor], labels: Tensor) -> Tensor:
        """Returns the loss of what the input dists brought; this is compiled."""
        received = Received(features, [tensor.size(0) for tensor in sized], dense.size(0))
        return self.model(dense, received, labels)

    def _take_input_dists(self, ids: Any) -> None:
        from torchrec.distributed.train_pipeline.utils import _override_input_dist_forwards

        from graphpasses.embedding.torchrec.input_dists import make_input_dist

        for index, module in enumerate(self._sharded):
            make_input_dist(module, ids.keys(), None, None)
            module.forward = types.MethodType(_look_up_received(index), module)
        _override_input_dist_forwards(self._sharded)  # they leave their splits to the fused exchange

    def _exchange(self, ids: Any) -> tuple[Any, list[int]]:
        from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable

        contexts = [module.create_context() for module in self._sharded]
        requests = [module.input_dist(context, ids) for module, context in zip(self._sharded, contexts, strict=True)]
        fused = FusedKJTListSplitsAwaitable(requests, contexts, dist.group.WORLD)
        features = [
            [(kjt.keys(), kjt.values(), kjt.lengths()) for kjt in awaitable.wait()] for awaitable in fused.wait()
        ]
        return features, contexts[0].sharding_contexts[0].batch_size_per_rank


def _look_up_received(index: int) -> Callable[..., Any]:
    from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
    from torchrec.distributed.embedding_types import KJTList
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    def forward(self: Any, received: Received) -> Any:
        context = self.create_context()
        inputs = []
        for keys, values, lengths in received.features[index]:
            stride = sum(received.batch_sizes)
            inputs.append(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, stride=stride))
            context.sharding_contexts.append(EmbeddingShardingContext(received.batch_sizes))
        return self.compute_and_output_dist(context, KJTList(inputs))

    return forward


@dataclass(frozen=True)
class Measured:
    """What a variant's steps took, the first and the counted ones, and computed.

    Args:
        walls: seconds of the slower rank.
        cpus: CPU seconds, the mean of the ranks.
        losses: rank 0's, of all steps.
        collectives: of a step, forward and backward.
    """

    walls: list[float]
    cpus: list[float]
    losses: list[float]
    collectives: tuple[int, int]


def _train(rounds: Rounds, workload: Workload, where: Where, inner: Inner, num_rounds: int) -> Measured:
    warnings.simplefilter("ignore")  # TorchRec and FBGEMM warn of their own code
    logging.disable(logging.ERROR)
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    import graphpasses
    from experiments.torchrec_bench.models import LR, build, make_batch
    from experiments.torchrec_parity.calls import profile_step

    def compile(model: nn.Module) -> Any:
        return graphpasses.compile(model, inner=inner, fullgraph=True)

    with tempfile.TemporaryDirectory(prefix="graphpasses-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # an empty one, so that compile times are of compiling
        with rounds.next():
            model = build(workload, workload.variants[0])
            run = {"eager": lambda: model, "traced": lambda: compile(model)}.get(
                where, lambda: BeforeTheGraph(model, compile).step
            )()
            dense = [weight for _, weight in in_backward_optimizer_filter(model.named_parameters())]
            optimizer = torch.optim.SGD(dense, lr=LR) if dense else None
        walls, cpus, losses = [], [], []
        for step in range(1 + NUM_WARM_UPS + num_rounds):
            batches = [make_batch(workload, 2 * step + index, dist.get_rank()) for index in range(2)]
            with rounds.next() as lines:
                # The second step of a round counts; the first finds its caches as other variants left them.
                for batch in batches[: 1 if step == 0 else 2]:
                    dist.barrier()
                    wall, cpu = time.perf_counter(), time.process_time()
                    loss = run(*batch)
                    loss.backward()
                    if optimizer is not None:
                        optimizer.step()
                        optimizer.zero_grad()
                    own = time.perf_counter() - wall, time.process_time() - cpu
                    everyone = [own] * dist.get_world_size()
                    dist.all_gather_object(everyone, own)
                    losses.append(loss.item())
                walls.append(max(wall for wall, _ in everyone))
                cpus.append(statistics.mean(cpu for _, cpu in everyone))
                if step == 0:
                    lines.append(f"first step {walls[0]:.1f} s, {cpus[0]:.1f} of CPU")
        with rounds.next():
            _, calls = profile_step(lambda: run(*batch))
    counted = slice(1 + NUM_WARM_UPS, None)
    return Measured([walls[0], *walls[counted]], [cpus[0], *cpus[counted]], losses, calls.collectives)


def _describe(result: Measured, eager: Measured) -> str:
    walls, cpus = result.walls[1:], result.cpus[1:]
    return (
        f"step {1e3 * statistics.median(walls):.1f} ms, fastest {1e3 * min(walls):.1f}, CPU "
        f"{1e3 * statistics.median(cpus):.1f}; first step {result.walls[0]:.1f} s, CPU {result.cpus[0]:.1f}; "
        f"{' + '.join(map(str, result.collectives))} collectives; "
        f"losses {'as' if result.losses == eager.losses else 'not as'} eager's"
    )


def _share(traced: list[float], other: list[float]) -> str:
    ratios = [1 - a / b for a, b in zip(traced[1:], other[1:], strict=True)]
    return f"{100 * statistics.median(ratios):.0f} %"


def main(inner: Inner = "inductor", rounds: int = 20, table_mib: int = 64, only: str = "one-hot, uniform") -> None:
    """Times both ways, and eager.

    Args:
        inner: what compiles the graphs after the passes; "aot_eager" keeps eager's bits.
        rounds: counted rounds.
        table_mib: size in MiB that no table exceeds.
        only: measure only the workloads of several ranks whose name contains this.
    """
    ways: tuple[Where, ...] = ("eager", "traced", "before the graph")
    for workload in workloads(table_mib):
        if only not in workload.name or workload.num_ranks == 1:
            continue
        print(workload.name, flush=True)
        variants = {where: (workload, where, inner, rounds) for where in ways}
        results = interleave(_train, workload.num_ranks, variants, print, _PRELOAD)
        if failures := [f"{where}: {result}" for where, result in results.items() if isinstance(result, str)]:
            raise SystemExit("\n".join(failures))
        for where, result in results.items():
            print(f"  {where}: {_describe(result, results['eager'])}", flush=True)
        traced, other = results["traced"], results["before the graph"]
        walls, cpus = _share(traced.walls, other.walls), _share(traced.cpus, other.cpus)
        print(f"  tracing saves {walls} of a step, {cpus} of its CPU time (medians over the rounds)", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
