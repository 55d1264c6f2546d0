"""Faults of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.faults.fault import BEGINNING, Answer, Fault, Training
from experiments.faults.models import Normalized, Quantized

__all__ = ["FAULTS"]

ADD, MUL, CAST = "aten.add_.Tensor", "aten.mul_.Tensor", "aten._to_copy.default"


def sets(fqn: str, **values: Any) -> dict[str, Any]:
    """Changes attributes of a module."""

    def prepare(training: Any) -> None:
        vars(training.model.get_submodule(fqn)).update(values)

    return {"prepare": prepare}


def runs(fqn: str, forward: Any) -> dict[str, Any]:
    """Gives a module another forward."""

    def prepare(training: Any) -> None:
        module = training.model.get_submodule(fqn)
        module.forward = partial(forward, training, module)

    return {"prepare": prepare}


def loss_is(change: Any) -> dict[str, Any]:
    """Changes the loss after it was computed."""
    return {"loss": lambda training, tokens: change(Training.loss(training, tokens))}


class Clipping(Training):
    """Scales the loss, as training in half precision does, and clips unscaled gradients."""

    scale, max_norm = 1024.0, 0.5

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.scale)

    def unscale(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad.mul_(1 / self.scale)

    def clip_norm(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def clip(self) -> None:
        self.unscale()
        self.clip_norm()


class Accumulating(Training):
    """Adds the gradients of two microbatches."""

    divisor = 2.0

    def step(self, tokens: Tensor) -> Tensor:
        for part in (tokens, tokens.flip(0)):
            loss = self.loss(part) / self.divisor
            self.backward(loss)
            self.between()
        self.update()
        return loss

    def between(self) -> None:
        """Between two microbatches."""


class Adaptive(Training):
    """Two groups of parameters, of which one decays, and a schedule."""

    decay_of_norms, betas = 0.0, (0.9, 0.99)

    def make_optimizer(self) -> torch.optim.Optimizer:
        norms = [each for name, each in self.model.named_parameters() if "norm" in name]
        rest = [each for name, each in self.model.named_parameters() if "norm" not in name]
        groups = [{"params": norms, "weight_decay": self.decay_of_norms}, {"params": rest}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, foreach=False)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return optimizer

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()


def scheduled_first(training: Any) -> None:
    training.schedule.step()
    training.optimizer.step()


class Frozen(Training):
    """A layer is frozen."""

    def prepare(self) -> None:
        self.model.layers[0].up.weight.requires_grad_(False)


class Recomputing(Training):
    """Layers are computed again in backward."""

    def prepare(self) -> None:
        self.model.recomputes = True


def other_random_state(training: Any) -> None:
    training.model.recomputes, training.model.keeps_random_state = True, False


class Autocast(Training):
    """The model runs in bfloat16."""

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().logits(tokens).float()


def misses_autocast(training: Any, module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), module.weight, module.bias)


class Masked(Training):
    """The loss counts only the tokens before the last one."""

    ignored = 0

    def num_counted(self, counted: Tensor) -> Tensor:
        return counted.sum()

    def loss(self, tokens: Tensor) -> Tensor:
        labels = self.labels(tokens).flatten()
        losses = F.cross_entropy(self.logits(tokens).flatten(0, 1), labels, reduction="none")
        counted = labels != self.ignored
        return (losses * counted).sum() / self.num_counted(counted)


class Statistics(Training):
    def make_model(self) -> nn.Module:
        return Normalized()


class LowPrecision(Training):
    def make_model(self) -> nn.Module:
        return Quantized()


class Momentum(Training):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9, foreach=False)


def poisons(training: Any, layer: Any, x: Tensor) -> Tensor:
    x = x + layer.attention(layer.norm(x))
    with torch.no_grad():
        x[0, 0, 0].fill_(float("nan"))
    return x + layer.drop(layer.down(layer.act(layer.up(x))))


def corrupts(training: Any, module: Any, x: Tensor) -> Tensor:
    y = F.gelu(x)
    x.data.mul_(2)  # which autograd has saved, and does not see
    return y


def unties(training: Any) -> None:
    training.model.head.weight = nn.Parameter(training.model.emb.weight.detach().clone())


def without_residual(training: Any, layer: Any, x: Tensor) -> Tensor:
    x = x + layer.attention(layer.norm(x))
    y: Tensor = layer.drop(layer.down(layer.act(layer.up(x))))
    return y


def detached(training: Any, layer: Any, x: Tensor) -> Tensor:
    x = x + layer.attention(layer.norm(x))
    return x + layer.drop(layer.down(layer.act(layer.up(x.detach()))))


def stale(training: Any, module: Any, x: Tensor) -> Tensor:
    return F.linear(x, training.old["layers.1.down.weight"], module.bias)


def rounded(training: Any, module: Any, x: Tensor) -> Tensor:
    return F.linear(x.bfloat16().float(), module.weight, module.bias)


def keeps_one_gradient(training: Any) -> None:
    for name, parameter in training.model.named_parameters():
        if name != "layers.1.up.weight":
            parameter.grad = None


def backward_twice(training: Any, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def zeroes_before_update(training: Any) -> None:
    training.optimizer.zero_grad()
    training.optimizer.step()


def rounds_weights(training: Any) -> None:
    training.optimizer.step()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.copy_(parameter.bfloat16())


def clips_first(training: Any) -> None:
    training.clip_norm()
    training.unscale()


def smoothed(training: Any, tokens: Tensor) -> Tensor:
    labels = training.labels(tokens).flatten()
    return F.cross_entropy(training.logits(tokens).flatten(0, 1), labels, label_smoothing=0.1)


def logged(training: Any, tokens: Tensor) -> Tensor:
    """Computes what changes nothing, and reads it."""
    loss = Training.loss(training, tokens)
    training.metric = (loss.detach() * 3).exp().item()
    return loss


def head_forgotten(training: Any) -> torch.optim.Optimizer:
    kept = [each for name, each in training.model.named_parameters() if name != "layers.1.down.bias"]
    return torch.optim.SGD(kept, lr=training.lr)


def resets_momentum(training: Any) -> None:
    training.optimizer.state.clear()
    training.optimizer.step()


def scales_gradient(training: Any) -> None:
    training.model.layers[1].act.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))


def evaluates(fqn: str) -> dict[str, Any]:
    return {"prepare": lambda training: training.model.get_submodule(fqn).eval()}


def fault(name: str, source: str, healthy: type[Training], changes: Any, *answer: Any) -> Fault:
    return Fault(name, source, healthy, changes, Answer(*answer))


FAULTS = (
    # What is computed forward
    fault("attention's scale", "tried", Training, sets("layers.1.attention", scale=0.5),
          "forward", "aten.mul.Tensor", "layers.1.attention"),
    fault("rotary positions begin elsewhere", "TTrace", Training, sets("layers.0.attention", offset=1),
          "forward", "aten.arange.start", "layers.0.attention"),
    fault("-inf in a mask", "TrainCheck", Training, sets("layers.0.attention", masked=float("-inf")),
          "forward", "aten.masked_fill.Scalar", "layers.0.attention"),
    fault("another GELU", "tried", Training, sets("layers.0.act", approximate="tanh"),
          "forward", "aten.gelu.default", "layers.0.act"),
    fault("another epsilon", "TTrace", Training, sets("layers.1.norm", eps=1e-3),
          "forward", "aten.native_layer_norm.default", "layers.1.norm"),
    fault("dropout of evaluation", "TrainCheck", Training, evaluates("layers.1.drop"),
          "forward", "aten.bernoulli_.float", "layers.1.drop"),
    fault("another rate of dropout", "tried", Training, sets("layers.1.drop", p=0.3),
          "forward", "aten.bernoulli_.float", "layers.1.drop"),
    fault("dropout seeded otherwise", "TTrace", Training, {"seed": lambda training: torch.manual_seed(5)},
          "forward", "aten.bernoulli_.float", "layers.0.drop"),
    fault("lost residual", "tried", Training, runs("layers.1", without_residual),
          "forward", "aten.add.Tensor", "layers.1"),
    fault("a cast too many", "TTrace", Training, runs("layers.1.up", rounded),
          "forward", CAST, "layers.1.up"),
    fault("a layer outside of autocast", "TrainCheck", Autocast, runs("layers.1.up", misses_autocast),
          "forward", CAST, "layers.1.up"),
    fault("stale scale of 8 bits", "TTrace", LowPrecision, sets("mid", is_stale=True),
          "forward", "aten.abs.default", "mid"),
    fault("a copy of a weight used", "TTrace", Training, runs("layers.1.down", stale),
          "backward", "aten.mm.default", "layers.1.down"),
    fault("NaN written in place", "TrainCheck", Training, runs("layers.0", poisons),
          "forward", "aten.fill_.Scalar", "layers.0"),
    fault("saved value overwritten", "TrainCheck", Training, runs("layers.0.act", corrupts),
          "forward", MUL, "layers.0.act"),
    fault("statistics of evaluation", "TrainCheck", Statistics, evaluates("norm"),
          "forward", ADD, "norm"),
    # What feeds only the loss
    fault("NaN just before the loss", "tried", Training, loss_is(lambda loss: loss * float("nan")),
          "loss", "aten.mul.Tensor"),
    fault("loss rounded", "tried", Training, loss_is(lambda loss: loss.bfloat16().float()), "loss", CAST),
    fault("loss scaled", "TrainCheck", Training, loss_is(lambda loss: loss / 2), "loss", "aten.div.Tensor"),
    fault("labels not shifted", "TrainCheck", Training, {"labels": lambda training, tokens: tokens},
          "loss", "aten.roll.default"),
    fault("another token ignored", "TTrace", Masked, {"ignored": 1}, "loss", "aten.ne.Scalar"),
    fault("averaged over padding", "TTrace", Masked,
          {"num_counted": lambda training, counted: torch.ones_like(counted).sum()}, "loss", "aten.sum.default"),
    fault("smoothed labels", "tried", Training, {"loss": smoothed}, "loss", "aten.sum.dim_IntList"),
    fault("accumulation without division", "TrainCheck", Accumulating, {"divisor": 1.0},
          "loss", "aten.div.Tensor"),
    # Backward
    fault("zero_grad forgotten", "TrainCheck", Training, {"zero_grad": lambda training: None},
          "backward", ADD, "norm"),
    fault("one gradient kept", "TrainCheck", Training, {"zero_grad": keeps_one_gradient},
          "backward", ADD, "layers.1.up"),
    fault("zero_grad between microbatches", "TrainCheck", Accumulating,
          {"between": lambda training: training.optimizer.zero_grad()}, "backward", ADD, "norm"),
    fault("backward twice", "TrainCheck", Training, {"backward": backward_twice}, "backward", ADD, "norm"),
    fault("frozen parameter trained", "TrainCheck", Frozen, {"prepare": lambda training: None},
          "backward", "aten.mm.default", "layers.0.up"),
    fault("trained parameter frozen", "TrainCheck", Training, {"prepare": Frozen.prepare},
          "backward", "aten.mm.default", "layers.0.up"),
    fault("detached", "tried", Training, runs("layers.1", detached), "backward", "aten.mm.default", "layers.1.up"),
    fault("tied weights untied", "TrainCheck", Training, {"prepare": unties}, "backward", "aten.add.Tensor", "emb"),
    fault("recomputed with another random state", "TTrace", Recomputing, {"prepare": other_random_state},
          "backward", "aten.bernoulli_.float", "layers.1.drop"),
    fault("gradient scaled by a hook", "tried", Training, {"prepare": scales_gradient},
          "backward", "aten.mul.Tensor", "layers.1.act"),
    # Gradients before the optimizer
    fault("clipped before unscaled", "TrainCheck", Clipping, {"clip": clips_first},
          "gradients", "aten._foreach_norm.Scalar"),
    fault("not unscaled", "TrainCheck", Clipping, {"clip": Clipping.clip_norm}, "gradients", MUL),
    fault("not clipped", "TrainCheck", Clipping, {"clip": Clipping.unscale},
          "gradients", "aten._foreach_norm.Scalar"),
    fault("clipped to another norm", "tried", Clipping, {"max_norm": 0.1}, "gradients", "aten.mul.Tensor"),
    # The optimizer
    fault("zero_grad before the update", "TrainCheck", Training, {"update": zeroes_before_update},
          "optimizer", ADD),
    fault("parameter not given to the optimizer", "TrainCheck", Training, {"make_optimizer": head_forgotten},
          "optimizer", ADD),
    fault("another learning rate", "tried", Training, {"lr": 0.2}, "optimizer", ADD),
    fault("another learning rate, and a metric", "tried", Training, {"lr": 0.2, "loss": logged}, "optimizer", ADD),
    fault("schedule before the update", "TrainCheck", Adaptive, {"update": scheduled_first},
          "optimizer", "aten.addcdiv_.default"),
    fault("norms decay", "TTrace", Adaptive, {"decay_of_norms": 0.1}, "optimizer", MUL),
    fault("another beta", "tried", Adaptive, {"betas": (0.8, 0.99)}, "optimizer", "aten.lerp_.Scalar"),
    fault("momentum lost", "TrainCheck", Momentum, {"update": resets_momentum}, "optimizer", MUL),
    fault("weights rounded after the update", "TTrace", Training, {"update": rounds_weights}, "optimizer", CAST),
    # What the step begins with
    fault("another batch", "tried", Training,
          {"batch": lambda training, step: Training.batch(training, step + 1)}, BEGINNING, "batch[0]"),
)  # fmt: skip
