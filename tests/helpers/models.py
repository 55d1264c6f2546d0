"""Tiny models and helpers that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.graph import TrainGraph, is_collective

NUM_TOKENS = 10


class Block(nn.Module):
    """LayerNorm, two biased linears with an uneven dim 0, and own parameters beside children."""

    def __init__(self, width: int = 8, hidden: int = 7) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))  # fewer elements than ranks
        self.down = nn.Linear(hidden, width)  # registered in another order than run
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.gain.sum()


class LanguageModel(nn.Module):
    """Embedding, blocks, norm and a head that is tied to the embedding."""

    def __init__(self, width: int = 8, hidden: int = 7, num_blocks: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_TOKENS, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# How gradients are reduced does not depend on how many blocks there are.
Short = partial(LanguageModel, num_blocks=1)


class Reused(nn.Module):
    """One module that runs three times, and one weight that three modules own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, 8)
        self.block = Block()
        self.mixers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for mixer in self.mixers:
            mixer.weight = self.mixers[0].weight
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for mixer in self.mixers:
            x = torch.tanh(mixer(self.block(x)))
        return self.head(x)


class Mixer(nn.Module):
    """Uses each read of its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return torch.tanh(torch.tanh(x @ weight) @ weight)


class Interleaved(nn.Module):
    """A weight that is read once a call and used twice, in a module that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, 8)
        self.mixer = Mixer()
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for _ in range(3):
            x = self.mixer(x)
        return self.head(x)


class TwoNames(LanguageModel):
    """A block that two names share, and that runs under both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = self.layers[0]


class Promoting(LanguageModel):
    """In low precision, norms' weights get float32 gradients, as does a view of another parameter."""

    class Norm(nn.RMSNorm):
        def __init__(self) -> None:
            super().__init__(8)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x).float() * self.scale.view(1, 1, 8)).to(x.dtype)

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__(num_blocks=num_blocks)
        for block in self.layers:
            block.norm = Promoting.Norm()
        self.norm = Promoting.Norm()


class PromotingTwice(Promoting):
    """The same norm runs before each block and after the last."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__(num_blocks=num_blocks)
        for block in self.layers:
            block.norm = nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(self.norm(x))
        return self.head(self.norm(x))


class Unused(LanguageModel):
    """A trainable and a frozen part that forward leaves out."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__(num_blocks=num_blocks)
        self.layers[0].idle = nn.Linear(8, 5)
        self.idle = nn.Linear(5, 8).requires_grad_(False)


class Recomputed(LanguageModel):
    """Blocks whose activations backward computes again, gathering their parameters again too."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


class Even(nn.Module):
    """Matrices only, every dim a multiple of four, to shard on dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(NUM_TOKENS, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.head = nn.Linear(8, NUM_TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class ParallelBlock(nn.Module):
    """A norm and two biased linears, every dim a multiple of eight; one of them, or all, may run twice."""

    def __init__(self, num_ups: int, num_runs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.num_ups, self.num_runs = num_ups, num_runs
        self.down = nn.Linear(16, 8)  # registered in another order than run
        self.up = nn.Linear(8, 16)
        self.norm = norm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_runs):
            normed = self.norm(x)
            x = x + self.down(sum(torch.relu(self.up(normed * (1 + index))) for index in range(self.num_ups)))
        return x


class Parallel(nn.Module):
    """Embedding, blocks and head for tensor parallelism."""

    def __init__(
        self,
        num_ups: int = 1,
        num_runs: int = 1,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        num_blocks: int = 2,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(ParallelBlock(num_ups, num_runs, norm) for _ in range(num_blocks))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gives :class:`Parallel` tensor and sequence parallelism on a mesh of one axis, as torchtitan does."""
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    plan = {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def make_parallel_meshes(num_ranks: int = 4, *, hybrid: bool = False) -> tuple[DeviceMesh, DeviceMesh]:
    """Returns the mesh of FSDP or HSDP, and that of two ranks for tensor parallelism, of one mesh."""
    played = f"_of_{dist.get_rank()}" if dist.get_backend() == "fake" else ""
    sizes = {"replicate": 2, "shard": num_ranks // 4} if hybrid else {"fsdp": num_ranks // 2}
    sizes |= {"tp": 2}
    names = tuple(f"{name}{played}" for name in sizes)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)
    return mesh[names[:-1]], mesh[names[-1]]


def captured_over_tensor_parallel(model: nn.Module, *, hybrid: bool = False, **options: Any) -> TrainGraph:
    """Captures the step of :class:`Parallel` under SimpleFSDP over tensor parallelism, unchecked."""
    data_mesh, tensor_mesh = make_parallel_meshes(dist.get_world_size(), hybrid=hybrid)
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, **options}
    simple_fsdp(parallelize(model, tensor_mesh), data_mesh, **options)
    return capture_train_step(next_token_loss, model, *even_token_batch(), check=False)


def frozen() -> LanguageModel:
    """Frozen parameters at the start, in the middle and at the end of a bucket."""
    model = LanguageModel()
    for fqn in ("norm.weight", "layers.0.down.weight", "layers.0.norm.bias", "layers.1.up.bias"):
        model.get_parameter(fqn).requires_grad_(False)
    return model


def mixed_dtypes() -> LanguageModel:
    """A frozen bf16 parameter of three elements among trainable fp32 ones."""
    model = LanguageModel()
    model.layers[0].gain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    return model


def next_token_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())


def token_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, NUM_TOKENS, (2, 2, 5), generator=generator)
    return tokens, labels


def even_token_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`token_batch`, with a number of tokens that two ranks share evenly."""
    tokens, labels = (torch.cat([part, part[:, :1]], dim=1) for part in token_batch(seed))
    return tokens, labels


def make_mesh(num_ranks: int = 4, *, hybrid: bool = False) -> DeviceMesh:
    # Where one process plays one rank after the other: DTensor's caches take meshes of equal ranks and names for
    # one, though local shapes and group names differ.
    played = f"_of_{dist.get_rank()}" if dist.get_backend() == "fake" else ""
    if hybrid:
        names = (f"replicate{played}", f"shard{played}")
        return init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=names)
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(f"fsdp{played}",))


def captured_fsdp(model: nn.Module, *, hybrid: bool = False, **options: Any) -> TrainGraph:
    """Captures a language model's step under SimpleFSDP, unchecked; a process group must be there."""
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, **options}
    simple_fsdp(model, make_mesh(hybrid=hybrid), **options)
    return capture_train_step(next_token_loss, model, *token_batch(), check=False)


_CAPTURED: dict[object, TrainGraph] = {}


@contextmanager
def on_fake_ranks(model: nn.Module, *, rank: int = 0, hybrid: bool = False, **options: Any) -> Iterator[TrainGraph]:
    """The step of ``model`` on one of four ranks of a fake process group; models of one kind are traced once."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    first = {id(p): fqn for fqn, p in reversed(parameters)}
    facts = tuple((fqn, first[id(p)], p.requires_grad, p.dtype) for fqn, p in parameters)
    key = (str(model), facts, rank, hybrid, tuple(options.items()))
    with fake_process_group(4, rank):
        if key not in _CAPTURED:
            _CAPTURED[key] = captured_fsdp(model, hybrid=hybrid, **options)
        else:
            make_mesh(hybrid=hybrid)  # the process groups that the graph names
        yield _CAPTURED[key].copy()


def collective_calls(graph: TrainGraph) -> list[tuple[Any, ...]]:
    """Every collective in order: what must be equal on every rank."""
    return [
        (
            str(node.target),
            *node.args[1:],
            tuple(node.args[0].meta["val"].shape),
            node.args[0].meta["val"].dtype,
        )
        for node in graph.graph.nodes
        if is_collective(node)
    ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))
