"""The graphs that are mutated: captured steps, what torch.compile shows of models, and both after the passes."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

import graphpasses
from experiments.mutants.models import Images, LanguageModel, Scores, ids_and_offsets, images, tokens
from experiments.mutants.running import Cluster, Inputs, copy_value, group_names, random_value, saved_values
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses.capture import capture_train_step, simple_fsdp
from graphpasses.embedding.torchrec.fake_kernels import fake_kernels_if_loaded
from graphpasses.fsdp.layout import Layout, eager_layout
from graphpasses.fsdp.plan import BucketPlan
from graphpasses.graph import (
    ALL_TO_ALL,
    WAIT,
    DynamoGraph,
    GraphInput,
    GraphOutput,
    InputKind,
    OutputKind,
    Stage,
    TrainGraph,
    parameter_infos,
)
from graphpasses.identity import IdentityMap
from graphpasses.passes import default_pipeline, recommender_pipeline
from graphpasses.passes.runner import GraphPass, Numerics, Pipeline

__all__ = ["SOURCES", "Pair", "Source"]

aten = torch.ops.aten
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
FSDP, HSDP, ALONE = {"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 1}


@dataclass(frozen=True)
class Pair:
    """A graph before and after a pipeline; both can be mutated.

    Args:
        name: what the table calls it.
        before: as it was captured.
        after: as the passes left it; ``before`` itself where no pass accepts its stage.
        cluster: the ranks on which both run.
        inputs: makes what they are given.
        layout: eager's, where the passes are to reduce in another place than ``before`` does.
        is_fragile: whether what is run may end the process, as kernels do that are given wrong offsets.
    """

    name: str
    before: TrainGraph
    after: TrainGraph
    cluster: Cluster = field(default_factory=partial(Cluster, {}))
    inputs: Inputs = random_value
    layout: Layout | None = None
    is_fragile: bool = False

    @property
    def graphs(self) -> dict[str, TrainGraph]:
        """The graphs to mutate, by what the table calls them."""
        if self.before is self.after:
            return {self.name: self.before}
        return {f"{self.name}, captured": self.before, f"{self.name}, rewritten": self.after}


@dataclass(frozen=True)
class Source:
    """A model whose graphs are mutated.

    Args:
        name: what the table calls it.
        axes: of the mesh, with their sizes.
        make: given the mesh, yields the graphs before and after the passes, and the layout that they must have.
        rank: whose graphs they are.
    """

    name: str
    axes: Mapping[str, int]
    make: Callable[[DeviceMesh], Iterator[Pair]]
    rank: int = 0

    @contextmanager
    def pairs(self) -> Iterator[list[Pair]]:
        """Makes the graphs; in the block there is the process group whose groups they name."""
        # DTensor's caches take meshes of equal ranks and names for one, though groups and local shapes differ.
        axes = {f"{name} of {self.name}": size for name, size in self.axes.items()}
        num_ranks = torch.Size(axes.values()).numel()
        # Fake values of mutants are computed as those of graphs are while they are compiled.
        with fake_process_group(num_ranks, self.rank), fake_kernels_if_loaded():
            mesh = Cluster(axes).mesh()
            cluster = Cluster(axes, group_names(mesh))
            torch.manual_seed(0)
            yield [replace(pair, name=f"{self.name}{pair.name}", cluster=cluster) for pair in self.make(mesh)]


def _captured(
    build: Callable[[], nn.Module],
    batch: Callable[[], tuple[Tensor, ...]],
    policy: MixedPrecisionPolicy,
    *,
    simply: bool = False,
) -> Callable[[DeviceMesh], Iterator[Pair]]:
    """The captured step of a model on which ``fully_shard`` was called.

    Or, if it is sharded ``simply``, of one of SimpleFSDP, which the passes give the layout of the eager reference.
    """

    def make(mesh: DeviceMesh) -> Iterator[Pair]:
        if simply:
            plan, layout, model = _reference_and_model(build, mesh, policy)
        else:
            plan, layout, model = None, None, _shard(build(), mesh, policy)
        captured = capture_train_step(_call, model, *batch(), check=False)
        yield Pair("", captured, default_pipeline(plan, expected_layout=layout).run(captured), layout=layout)

    return make


def _compiled(
    build: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, ...]], policy: MixedPrecisionPolicy
) -> Callable[[DeviceMesh], Iterator[Pair]]:
    """What ``torch.compile`` shows of a model of SimpleFSDP; of the first graph, inputs are DTensors."""

    def make(mesh: DeviceMesh) -> Iterator[Pair]:
        plan, layout, model = _reference_and_model(build, mesh, policy)
        pipeline = default_pipeline(plan, expected_layout=layout)
        for pair in _compile(model, batch, pipeline):
            if pair.before.stage is not Stage.DYNAMO:
                yield replace(pair, layout=layout if pair.before.stage is Stage.JOINT else None)

    return make


def _compiled_alone(
    build: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, ...]], pipeline: Pipeline
) -> Callable[[DeviceMesh], Iterator[Pair]]:
    """What ``torch.compile`` shows of a model that no other rank has a part of."""

    def make(mesh: DeviceMesh) -> Iterator[Pair]:
        yield from _compile(build(), batch, pipeline)

    return make


def _compile(model: nn.Module, batch: Callable[[], tuple[Tensor, ...]], pipeline: Pipeline) -> Iterator[Pair]:
    before, after = Keep("keep-before"), Keep("keep-after")
    torch.compiler.reset()
    passes = Pipeline((before, *pipeline.passes, after))
    compiled = graphpasses.compile(model, pipeline=passes, inner="aot_eager", fullgraph=True)
    compiled(*batch()).backward()
    for stage, captured in before.graphs.items():
        rewritten = after.graphs[stage]
        changed = str(captured.graph) != str(rewritten.graph)
        yield Pair(f", {stage.value}", captured, rewritten if changed else captured)


def _looked_up(mesh: DeviceMesh) -> Iterator[Pair]:
    """What ``torch.compile`` shows of embedding bags that become calls of FBGEMM's fused tables."""
    # Its presence is what makes graphpasses trace FBGEMM's operators.
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    model = Scores()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.1})
    values: dict[str, Any] = {}

    def inputs(item: GraphInput, fake: Any, rank: int) -> Any:
        return values[item.fqn] if item.fqn in values else random_value(item, fake, rank)

    for pair in _compile(model, ids_and_offsets, recommender_pipeline(lower_embedding_bags=True)):
        if isinstance(pair.after, DynamoGraph):  # its pass may round, so that it stands for itself
            given = zip(pair.after.inputs, pair.after.live, strict=True)
            values |= {item.fqn: copy_value(value) for item, value in given}
            pair = replace(pair, before=pair.after)
        if pair.before.stage is Stage.FORWARD:
            values |= saved_values(pair.before, inputs)
        yield replace(pair, inputs=inputs, is_fragile=True)


def _exchanged(mesh: DeviceMesh) -> Iterator[Pair]:
    """Lookups in tables of two ranks, as TorchRec does them."""
    model = nn.ModuleList(nn.Embedding(8, width) for width in (4, 4, 8))
    group = group_names(mesh)[-1]

    def send(rows: Tensor) -> Tensor:
        splits = [len(rows) // 2] * 2
        received: Tensor = WAIT(ALL_TO_ALL(rows, splits, splits, group))
        return received

    def look_up(first: Tensor, second: Tensor, third: Tensor, ids: Tensor, others: Tensor) -> list[Tensor]:
        pooled = [
            send(aten.embedding(table, send(each)))
            for table, each in ((first, ids), (second, others), (third, ids), (first, ids))
        ]
        left, right = torch.cat(pooled, 1).split_with_sizes([8, 12], 1)
        return [torch.cat([right, left], 1), pooled[0] - pooled[3]]

    tables = [(GraphInput(InputKind.PARAMETER, fqn), value) for fqn, value in model.named_parameters()]
    ids = [(GraphInput(InputKind.VALUE, name), torch.zeros(6, dtype=torch.long)) for name in ("ids", "others")]
    items, values = zip(*tables, *ids, strict=True)
    identity = IdentityMap.of(model)
    captured = TrainGraph(
        module=make_fx(look_up, tracing_mode="fake")(*(value.detach() for value in values)),
        inputs=items,
        outputs=tuple(GraphOutput(OutputKind.VALUE, name) for name in ("pooled", "difference")),
        identity=identity,
        parameters=parameter_infos(model, identity),
        model=model,
        stage=Stage.JOINT,
    )
    yield Pair("", captured, recommender_pipeline().at(Stage.JOINT).run(captured))


def _pooled(mesh: DeviceMesh) -> Iterator[Pair]:
    """Pooled embeddings of two modules, and their gradients, of batches whose sizes two ranks tell each other.

    The batches have one size when it runs: the rewritten graph is this rank's, and all ranks run it.
    """
    import torchrec.distributed.comm_ops  # noqa: F401  defines the operators

    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")

    group = group_names(mesh)[-1]
    ops, widths = torch.ops.torchrec, (2, 3)

    def exchange(x: Tensor, come: Sequence[Any], go: Sequence[Any]) -> Tensor:
        received: Tensor = WAIT(ALL_TO_ALL(x, come, go, group))
        return received

    def look_up(x: Tensor, scale: Tensor) -> list[Tensor]:
        own, columns, rows_of = x.shape[0], [], []
        for width in widths:
            size = aten.scalar_tensor.default(own, dtype=torch.int64)
            told = exchange(torch.stack([size, size]), [1, 1], [1, 1])
            rows = [told[rank].item() for rank in range(2)]
            pooled = exchange(torch.cat([x, x]), rows, [own, own]).unsqueeze(1) * scale[:width]
            flat = exchange(pooled.view(-1), [own * width] * 2, [size * width for size in rows])
            columns.append(ops._split_1d_cat_2d(flat, own, [width] * 2))
            rows_of.append(rows)
        gradients = []
        for of_module, width, rows in zip(columns, widths, rows_of, strict=True):
            sent = ops._split_1d_cat_2d_backward_impl(of_module * 3, [width] * 2)
            flat = exchange(sent, [size * width for size in rows], [own * width] * 2)
            gradients.append((flat / 2).view([sum(rows), width]).sum(0))
        return [torch.cat(columns, 1), *gradients]

    identity = IdentityMap.of(nn.Module())
    captured = TrainGraph(
        module=make_fx(look_up, tracing_mode="symbolic")(torch.ones(5), torch.ones(3)),
        inputs=(GraphInput(InputKind.VALUE, "x"), GraphInput(InputKind.VALUE, "scale")),
        outputs=tuple(GraphOutput(OutputKind.VALUE, name) for name in ("columns", "first", "second")),
        identity=identity,
        parameters={},
        model=nn.Module(),
        stage=Stage.JOINT,
    )
    yield Pair("", captured, recommender_pipeline().at(Stage.JOINT).run(captured))


@dataclass(frozen=True)
class Keep(GraphPass):
    """Keeps the graph of each stage."""

    name: str
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    graphs: dict[Stage, TrainGraph] = field(default_factory=dict, compare=False)

    def rewrite(self, graph: TrainGraph) -> int:
        """Changes nothing."""
        self.graphs[graph.stage] = graph.copy()
        return 0

    def uuid(self) -> str:
        """Makes compilers' caches miss, which would skip the passes."""
        return uuid.uuid4().hex


def _call(model: nn.Module, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def _shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def _reference_and_model(
    build: Callable[[], nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> tuple[BucketPlan, Layout, nn.Module]:
    eager = _shard(build(), mesh, policy)
    model = simple_fsdp(build(), mesh, param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
    return BucketPlan.from_fully_shard(eager), eager_layout(eager), model


SOURCES = (
    Source("FSDP2, tied", FSDP, _captured(partial(LanguageModel, tied=True), tokens, BF16)),
    Source("FSDP2, HSDP, a layer twice", HSDP, _captured(partial(LanguageModel, reused=True), tokens, BF16)),
    Source(
        "FSDP2, reduced in fp32, uneven",
        FSDP,
        _captured(partial(LanguageModel, hidden=7), tokens, MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        rank=3,
    ),
    Source(
        "FSDP2, recomputed dropout",
        FSDP,
        _captured(partial(LanguageModel, recomputed=True, dropout=0.5), tokens, BF16),
    ),
    Source("FSDP2, BatchNorm, fp32", FSDP, _captured(Images, images, MixedPrecisionPolicy())),
    Source("FSDP2, wide", FSDP, _captured(partial(LanguageModel, 128, 128), tokens, BF16)),
    Source("SimpleFSDP, tied", FSDP, _captured(partial(LanguageModel, tied=True), tokens, BF16, simply=True)),
    Source(
        "SimpleFSDP, HSDP, a layer twice",
        HSDP,
        _captured(partial(LanguageModel, reused=True), tokens, BF16, simply=True),
    ),
    Source("torch.compile, SimpleFSDP", FSDP, _compiled(LanguageModel, tokens, BF16)),
    Source("embedding exchange", {"ranks": 2}, _exchanged),
    Source("pooled embeddings, sizes that vary", {"ranks": 2}, _pooled),
    Source("torch.compile, embedding bags", ALONE, _looked_up),
    Source("torch.compile, BatchNorm", ALONE, _compiled_alone(Images, images, recommender_pipeline())),
)
