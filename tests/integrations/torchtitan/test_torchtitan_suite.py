"""torchtitan's own tests of graph_trainer's FSDP passes, on a CPU, with ours in their place.

Of ``graph_trainer/tests`` in torchtitan 0.3.0, these are about what our passes do:

- ``TestFSDPUnshardDedupPass``: runs as it is; ``deduplicate_fsdp_unshard_chains_pass`` is ``deduplicate-shared``.
- ``TestBucketingPrefetchOrder``: its two tests of the order of all-gathers run on one of 8 ranks of a fake process
  group, with CPU for CUDA and SDPA for FlexAttention, which has no backward on a CPU. (Its third is about dead code.)

The others that run on a CPU are about what only torchtitan makes: ``TestFsdpDenseSchedulerPass`` moves buckets by the
marks of its own bucketing, ``TestDefaultTransformerBlockBuckets`` and
``TestChunkPasses.test_moe_efsdp_bucket_plan_splits_expert_buckets`` ask which modules its buckets name,
``TestApplySACPass`` and ``GraphPPFSDPCollectiveSplitTest`` save values and cut graphs at its unshards.
``TestReassignCollectivePgsPass`` and ``TestOverlapPgIsolationPass`` give collectives CUDA streams of their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from experiments.graph_trainer_parity.ranks import own_groups
from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.gloo import ALL_GATHER
from graphpasses.commands.train_torchtitan_on_cpu import make_assets
from graphpasses.graph import GraphInput, GraphOutput, InputKind, OutputKind, TrainGraph, argument, fake_value
from graphpasses.graph.parameters import parameter_infos
from graphpasses.identity import IdentityMap
from graphpasses.parity.launch import run_ranks
from graphpasses.passes import DeduplicateShared

NUM_RANKS = 8
NUM_LAYERS = 3  # of the debug model's six
DEDUP = "test_duplicate_fsdp_unshard_chains_are_canonicalized"
NEVER = "test_forward_allgather_prefetch_follows_layer_order"
ALWAYS = "test_allgather_prefetch_with_reshard_after_forward"

Pass = Callable[..., fx.GraphModule]


def deduplicate(gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
    """``deduplicate-shared`` on a graph that says of itself neither what it reads nor what it yields."""
    values = {"sharded_param": torch.empty(4, device="meta"), "x": torch.empty(4, device="meta")}
    output = gm.graph.output_node()
    output.args = ([output.args[0]],)
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta["val"] = values[node.target] if node.op == "placeholder" else fake_value(node)
    model = nn.Module()
    model.sharded_param = nn.Parameter(values["sharded_param"])
    identity = IdentityMap.of(model)
    step = TrainGraph(
        gm,
        inputs=(GraphInput(InputKind.PARAMETER, "sharded_param"), GraphInput(InputKind.BATCH, "x")),
        outputs=(GraphOutput(OutputKind.LOSS),),
        identity=identity,
        parameters=parameter_infos(model, identity),
        model=model,
    )
    return DeduplicateShared().as_function(step)(gm)


def unchanged(gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
    return gm


def last_layer_first(gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
    """Launches forward's all-gather of the last layer before those of the others, which changes no value."""
    gathers = bucketed_all_gathers(gm.graph)
    first, last = ({gather, *inputs_of(gather)} for gather in (gathers[0], gathers[NUM_LAYERS - 1]))
    start = next(node for node in gm.graph.nodes if node in first)
    for node in [node for node in gm.graph.nodes if node in last]:
        start.prepend(node)
    gm.recompile()
    return gm


def inputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """What was computed from parameters for ``node``."""
    for source in node.all_input_nodes:
        if source.op != "placeholder":
            yield source
            yield from inputs_of(source)


def bucketed_all_gathers(graph: fx.Graph) -> list[fx.Node]:
    found = graph.find_nodes(op="call_function", target=ALL_GATHER)
    return [node for node in found if argument(node).target == torch.ops.aten.cat.default]


class CudaIsCpu(TorchFunctionMode):
    """Makes on the CPU what a test makes on "cuda"."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def on_cpu(test_passes: ModuleType) -> type[unittest.TestCase]:
    """Returns the tests of the order of all-gathers without their processes and GPUs."""
    read = test_passes.TestBucketingPrefetchOrder._get_bucketed_ag_layer_order

    class PrefetchOrderOnCpu(test_passes.TestBucketingPrefetchOrder):
        world_size = NUM_RANKS
        layers: ClassVar[list[int]] = []

        def setUp(self) -> None:
            self.rank = 0

        def tearDown(self) -> None: ...

        @staticmethod
        def _get_bucketed_ag_layer_order(gm: fx.GraphModule) -> list[int]:
            """It looks for buckets by the operator that torchtitan's bucketing writes them with."""
            graph = fx.Graph()
            graph.output(graph.graph_copy(gm.graph, val_map={}))
            for node in bucketed_all_gathers(graph):
                node.target = torch.ops._c10d_functional.all_gather_into_tensor_out.default
            PrefetchOrderOnCpu.layers = read(SimpleNamespace(graph=graph))
            return PrefetchOrderOnCpu.layers

    return PrefetchOrderOnCpu


@contextlib.contextmanager
def our_pipeline(last: Pass) -> Iterator[None]:
    """Gives the trainers of torchtitan's tests our pipeline with one more pass, and what it asks of a trainer."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.experiments.graph_trainer import llama3, registry
    from torchtitan.experiments.graph_trainer.tests import _trainer_test_utils as utils

    from graphpasses.integrations.torchtitan.pass_pipeline import PIPELINE, graph_passes

    build, model_registry = utils.build_minimal_trainer, llama3.model_registry

    def small_model(flavor: str) -> Any:
        spec = model_registry(flavor, attn_backend="sdpa")
        spec.model.layers = spec.model.layers[:NUM_LAYERS]
        return spec

    def build_trainer(*args: Any, fsdp_reshard_after_forward: str, **options: Any) -> Any:
        trainer = build(*args, fsdp_reshard_after_forward=fsdp_reshard_after_forward, **options)
        config = trainer.config
        trainer.device = torch.device("cpu")
        trainer.parallel_dims = ParallelDims(
            dp_shard=-1,
            dp_replicate=1,
            cp=1,
            tp=1,
            pp=1,
            ep=1,
            world_size=NUM_RANKS,
            spmd_backend="partial_dtensor",
        )
        config.compile.pass_pipeline = PIPELINE
        config.model_spec = small_model("debugmodel")
        config.parallelism = ParallelismConfig(
            fsdp_reshard_after_forward=fsdp_reshard_after_forward, spmd_backend="partial_dtensor"
        )
        config.training = TrainingConfig()
        config.dump_folder = ""
        config.loss = CrossEntropyLoss.Config()
        registry.POST_INIT_HOOKS[PIPELINE](trainer)
        return trainer

    def passes(*args: Any, **options: Any) -> list[Pass]:
        return [*graph_passes(*args, **options), last]

    with (
        patch.object(utils, "build_minimal_trainer", build_trainer),
        patch.object(llama3, "model_registry", small_model),
        patch.dict(registry.PASS_PIPELINE_REGISTRY, {PIPELINE: passes}),
    ):
        yield


def failure(test: unittest.TestCase) -> str:
    """Returns "" for a test that passed, else what it raised."""
    result = unittest.TextTestRunner(stream=io.StringIO()).run(test)
    assert result.testsRun == 1
    assert not result.skipped
    lines = [line for _, text in (*result.failures, *result.errors) for line in text.splitlines()]
    return next((line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)), "".join(lines))


def run_suite(folder: Path) -> dict[tuple[str, str], tuple[str, list[int]]]:
    """Returns what each test raised and read, with our passes and with a control in their place."""
    os.chdir(folder)  # the tests look for a tokenizer there
    with own_groups(folder):
        from torchtitan.experiments.graph_trainer.tests import test_passes

        outcomes: dict[tuple[str, str], tuple[str, list[int]]] = {}
        for dedup in (deduplicate, unchanged):
            with patch.object(test_passes, "deduplicate_fsdp_unshard_chains_pass", dedup):
                test = test_passes.TestFSDPUnshardDedupPass(DEDUP)
                outcomes[DEDUP, dedup.__name__] = failure(test), []
        prefetch_order = on_cpu(test_passes)
        for name in (NEVER, ALWAYS):
            for last in (unchanged, last_layer_first):
                with fake_process_group(NUM_RANKS), our_pipeline(last), CudaIsCpu():
                    outcomes[name, last.__name__] = failure(prefetch_order(name)), prefetch_order.layers
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[str, list[int]]]:
    pytest.importorskip("torchtitan")
    pytest.importorskip("expecttest")
    folder = tmp_path_factory.mktemp("titan")
    make_assets(folder)
    (outcomes,) = run_ranks(run_suite, 1, folder)
    return outcomes


@pytest.mark.multiprocess
def test_unshard_chains_are_canonicalized(outcomes: dict[tuple[str, str], tuple[str, list[int]]]) -> None:
    assert outcomes[DEDUP, "deduplicate"] == ("", [])
    assert outcomes[DEDUP, "unchanged"][0] == "AssertionError: Scalars are not equal!"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "backward"), [(NEVER, []), (ALWAYS, [1, 0])])
def test_all_gathers_follow_the_layers(
    outcomes: dict[tuple[str, str], tuple[str, list[int]]], name: str, backward: list[int]
) -> None:
    layers = [*range(NUM_LAYERS), *backward]  # one that is gathered twice in a row is read once
    assert outcomes[name, "unchanged"] == ("", layers)
    error, read = outcomes[name, "last_layer_first"]
    assert "all_gather prefetch order violated" in error
    assert read == [NUM_LAYERS - 1, *layers]
