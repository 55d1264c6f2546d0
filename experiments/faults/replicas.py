"""Faults of two ranks: data, tensor and sequence parallelism, an optimizer that is shared, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from experiments.faults.fault import BEGINNING, Answer, Fault, Training, on_rank
from experiments.faults.models import NUM_TOKENS, Normalized, ParallelModel

__all__ = ["FAULTS"]

ADD, CAST = "aten.add_.Tensor", "aten._to_copy.default"
ALL_REDUCE, BROADCAST = "c10d.allreduce_.default", "c10d.broadcast_.default"
GATHER, REDUCE_SCATTER = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"


class Data(Training):
    """Each rank has its batch; gradients are averaged by hand."""

    op: Any = dist.ReduceOp.SUM
    forgotten: tuple[str, ...] = ()
    divisor = 2.0

    def group(self) -> Any:
        return dist.group.WORLD

    def sent(self, gradient: Tensor) -> Tensor:
        return gradient

    def reduce(self) -> None:
        group = self.group()
        for name, parameter in self.model.named_parameters():
            if name not in self.forgotten:
                sent = self.sent(parameter.grad)
                dist.all_reduce(sent, op=self.op, group=group)
                if sent is not parameter.grad:
                    parameter.grad.copy_(sent)
            parameter.grad.div_(self.divisor)


def own_group(training: Any) -> Any:
    return [dist.new_group([0]), dist.new_group([1])][training.rank]


def reduces_twice(training: Any) -> None:
    for _ in range(2):
        dist.all_reduce(training.model.layers[0].norm.weight.grad)
    Data.reduce(training)


def divides_again(training: Any) -> None:
    Data.reduce(training)
    for parameter in training.model.parameters():
        parameter.grad.div_(2)


def batch_of_rank_0(training: Any, step: int) -> Tensor:
    return torch.randint(NUM_TOKENS, (3, 5), generator=torch.Generator().manual_seed(10 * step))


class Initialized(Data):
    """Ranks are initialized unlike, and rank 0's weights are broadcast."""

    def prepare(self) -> None:
        torch.manual_seed(self.rank)
        nn.init.normal_(self.model.head.weight)
        self.send()

    def send(self) -> None:
        for parameter in self.model.parameters():
            dist.broadcast(parameter.detach(), 0)


class Buffers(Data):
    """Rank 0's running statistics are broadcast when a step begins."""

    def make_model(self) -> nn.Module:
        return Normalized()

    def send(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def update(self) -> None:
        super().update()
        self.send()


class Branching(Data):
    """All ranks skip an update whose mean loss is large."""

    def mean(self, loss: Tensor) -> Tensor:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / 2

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.loss(tokens)
        self.backward(loss)
        self.reduce()
        if self.mean(loss).item() < self.limit():
            self.update()
        return loss

    def limit(self) -> float:
        return 100.0


def own_loss(training: Any, loss: Tensor) -> Tensor:
    """A rank's own loss, of which one is beyond the limit."""
    return loss.detach() + 100 * training.rank


class SharedOptimizer(Data):
    """Each rank updates half of the parameters, and sends them."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(self.model.parameters())[self.rank :: 2], lr=self.lr)

    def send(self) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            dist.broadcast(parameter.detach(), index % 2)

    def update(self) -> None:
        super().update()
        self.send()

    def zero_grad(self) -> None:
        self.model.zero_grad()


class Parallel(Training):
    """Tensor and sequence parallelism: gradients of what is replicated are summed."""

    per_rank = tuple(
        f"layers.{layer}.mlp.{name}" for layer in range(2) for name in ("up.weight", "up.bias", "down.weight")
    )
    forgotten: tuple[str, ...] = ()

    def make_model(self) -> nn.Module:
        return ParallelModel()

    def batch(self, step: int) -> Tensor:
        tokens = torch.randint(NUM_TOKENS, (6, 3), generator=torch.Generator().manual_seed(step))
        return tokens.chunk(2)[self.rank].contiguous()

    def reduce(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name not in (*self.per_rank, *self.forgotten):
                dist.all_reduce(parameter.grad)


def parallel(fqn: str, **values: Any) -> dict[str, Any]:
    """Changes attributes of a module of a parallel model, on all ranks."""
    return {"prepare": lambda training: vars(training.model.get_submodule(fqn)).update(values)}


def halves(training: Any) -> None:
    group = [dist.new_group([0]), dist.new_group([1])][training.rank]
    training.model.layers[1].mlp.group = group


class Replicated(Training):
    """DistributedDataParallel."""

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.wrapped(tokens)
        return logits

    def prepare(self) -> None:
        self.wrapped = DistributedDataParallel(self.model)


def scales_on_rank_1(training: Any) -> None:
    if training.rank == 1:
        training.model.layers[1].act.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))
    Replicated.prepare(training)


def without_sync(training: Any, loss_tokens: Tensor) -> Tensor:
    training.wrapped.require_backward_grad_sync = False
    return Training.loss(training, loss_tokens)


class Sharded(Training):
    """FSDP2."""

    def prepare(self) -> None:
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def sharded(change: Callable[[Any], object]) -> dict[str, Any]:
    def prepare(training: Any) -> None:
        Sharded.prepare(training)
        change(training.model)

    return {"prepare": prepare}


def keeps_gradients_whole(model: Any) -> None:
    model.layers[1].set_requires_gradient_sync(False)


def divides_by_four(model: Any) -> None:
    model.layers[0].set_gradient_divide_factor(4.0)
    model.layers[0].set_force_sum_reduction_for_comms(True)  # gloo has no other


def sets_on_rank(rank: int, fqn: str, **values: Any) -> dict[str, Any]:
    return {"prepare": on_rank(rank, lambda training: vars(training.model.get_submodule(fqn)).update(values))}


def fault(name: str, source: str, healthy: type[Training], changes: Any, *answer: Any) -> Fault:
    phase, operator, module, ranks = (*answer, *("", (0, 1))[len(answer) - 2 :])
    return Fault(name, source, healthy, changes, Answer(phase, operator, module, ranks), num_ranks=2)


NORM = "layers.0.norm.weight"
FAULTS = (
    # Gradients that are averaged by hand
    fault("gradient not reduced", "TTrace", Data, {"forgotten": (NORM,)}, "reduction", ALL_REDUCE),
    fault("reduced twice", "TTrace", Data, {"reduce": reduces_twice}, "reduction", ALL_REDUCE),
    fault("MAX for SUM", "tried", Data, {"op": dist.ReduceOp.MAX}, "reduction", ALL_REDUCE),
    fault("reduced in another group", "TTrace", Data, {"group": own_group}, "reduction", ALL_REDUCE),
    fault("not divided by the ranks", "TTrace", Data, {"divisor": 1.0}, "gradients", "aten.div_.Tensor"),
    fault("divided twice", "TTrace", Data, {"reduce": divides_again}, "gradients", "aten.div_.Tensor"),
    fault("gradients sent in bfloat16", "TTrace", Data,
          {"sent": lambda training, gradient: gradient.bfloat16()}, "gradients", CAST),
    fault("batches alike on all ranks", "TrainCheck", Data,
          {"batch": batch_of_rank_0},
          BEGINNING, "batch[0]", "", (1,)),
    fault("weights not broadcast", "TrainCheck", Initialized, {"send": lambda training: None},
          BEGINNING, "weight of emb.weight", "", (1,)),
    fault("running statistics not broadcast", "TrainCheck", Buffers, {"send": lambda training: None},
          "optimizer", BROADCAST),
    fault("a branch by a rank's own loss", "TrainCheck", Branching, {"mean": own_loss},
          "reduction", ALL_REDUCE),
    fault("a rank skips an update", "TrainCheck", Branching, {"limit": on_rank(1, lambda _: 0.0, lambda _: 100.0)},
          "optimizer", ADD, "", (1,)),
    fault("updated parameters not sent", "TTrace", SharedOptimizer, {"send": lambda training: None},
          "optimizer", BROADCAST),
    fault("another GELU on a rank", "tried", Data, sets_on_rank(1, "layers.1.act", approximate="tanh"),
          "forward", "aten.gelu.default", "layers.1.act", (1,)),
    fault("a rank's learning rate", "TrainCheck", Data, {"lr": 0.1, "update": on_rank(
          1, lambda t: (t.optimizer.param_groups[0].update(lr=0.3), Training.update(t)), Training.update)},
          "optimizer", ADD, "", (1,)),
    # Tensor and sequence parallelism
    fault("a norm's gradient not summed", "TTrace", Parallel, {"forgotten": (NORM,)}, "reduction", ALL_REDUCE),
    fault("a tied embedding's gradient not summed", "TTrace", Parallel, {"forgotten": ("emb.weight",)},
          "reduction", ALL_REDUCE),
    fault("output not reduced", "TTrace", Parallel, parallel("layers.1.mlp", op_forward=None),
          "forward", REDUCE_SCATTER, "layers.1.mlp"),
    fault("output reduced by MAX", "tried", Parallel, parallel("layers.1.mlp", op_forward=dist.ReduceOp.MAX),
          "forward", REDUCE_SCATTER, "layers.1.mlp"),
    fault("output reduced in another group", "TTrace", Parallel, {"prepare": halves},
          "forward", REDUCE_SCATTER, "layers.1.mlp"),
    fault("input's gradient not reduced", "TTrace", Parallel, parallel("layers.1.mlp", op_backward=None),
          "backward", REDUCE_SCATTER, "layers.1.mlp"),
    fault("positions of rank 0 on rank 1", "TTrace", Parallel, {"prepare": lambda t: setattr(t.model, "offset", 0)},
          "forward", "aten.arange.start", "", (1,)),
    fault("dropout seeded alike", "TTrace", Parallel, {"seed": lambda training: torch.manual_seed(100)},
          "forward", "aten.bernoulli_.float", "layers.0.drop", (1,)),
    fault("a norm that drifts on a rank", "TrainCheck", Parallel, {"update": on_rank(
          1, lambda t: (Training.update(t), t.model.layers[0].norm.weight.data.mul_(1.01)), Training.update)},
          "optimizer", "aten.mul_.Tensor", "", (1,)),
    # DDP and FSDP2
    fault("DDP without its reductions", "TrainCheck", Replicated, {"loss": without_sync},
          "reduction", ALL_REDUCE),
    fault("DDP, a gradient scaled on a rank", "TTrace", Replicated, {"prepare": scales_on_rank_1},
          "backward", "aten.mul.Tensor", "layers.1.act", (1,)),
    fault("FSDP2, gradients not reduced", "TTrace", Sharded, sharded(keeps_gradients_whole),
          "reduction", "fsdp.reduce_gradient", "layers.1.attention.qkv"),
    fault("FSDP2, divided by another number", "TTrace", Sharded, sharded(divides_by_four),
          "reduction", "fsdp.reduce_gradient", "layers.0.attention.qkv"),
)  # fmt: skip
