"""torchtitan's own trainers on real ranks: eager FSDP2 and graph_trainer with our pipeline have the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from experiments.graph_trainer_parity.ranks import as_torchrun, stores
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.commands.train_torchtitan_on_cpu import make_assets
from graphpasses.errors import UnsupportedError
from graphpasses.fsdp import diff_layouts
from graphpasses.identity import IdentityMap
from graphpasses.integrations.torchtitan.cpu_configs import Recipe
from graphpasses.parity import compare_runs, read_run
from graphpasses.parity.launch import run_ranks
from tests.helpers.models import LanguageModel

NUM_STEPS = 2
NUM_CHUNKS = 2  # of torchtitan's eight
# Of chunks: torch 2.13's tracer knows no batch of unknown size, which graph chunking traces.
STRATEGY: Literal["eager", "graph"] = "eager" if RELEASE == (2, 13) else "graph"


@dataclass(frozen=True)
class Case:
    """What a model is trained like: on four ranks where the mesh of its parameters has a second axis, else on two."""

    recipe: Recipe
    has_passes: bool = True
    chunks: tuple[str, Literal["batch", "seq"]] | None = None  # modules that run on two chunks, and of which dim
    compile: tuple[tuple[str, Any], ...] = ()  # options of graph_trainer


MOE = (1,)  # the first of the layers with experts, without the dense one
STAGES: dict[str, Any] = {
    "layers": (0, 1),
    "pipeline_parallel": 2,
    "local_batch_size": 4,
    "reduce_dtype": "bfloat16",
}

# experiments/graph_trainer_parity has more models and steps; `make parity` trains two of them on four ranks, one on
# replicas.
CASES = {
    "sharded": {
        "llama3 tied": Case(Recipe("llama3", tied=True, layers=(0,))),
        "replicated": Case(Recipe("llama3", tied=True, layers=(0,), num_replicas=2)),
        "fused": Case(Recipe("llama3", tied=True, layers=(0,)), compile=(("pass_pipeline", "graphpasses_fused"),)),
        # A control: as traced, a tied weight's gradients are reduced one by one, and then added.
        "no passes": Case(Recipe("llama3", tied=True, layers=(0,)), has_passes=False),
        "offloaded": Case(
            Recipe("llama3", tied=True, layers=(0,)),
            compile=(("memory_policy", "sac_and_offload"), ("enable_fsdp_ag_rs_overlap", True)),
        ),
        # Several microbatches, each with a loss in chunks.
        "accumulated": Case(Recipe("llama3", tied=True, chunked_loss=True, layers=(0,), global_batch_size=4)),
    },
    "context parallel": {"llama3": Case(Recipe("llama3", layers=(0,), context_parallel=2, local_batch_size=1))},
    # Each mesh by itself: DTensor's caches take meshes of other groups, but of equal ranks and names, for one.
    # Sizes depend on where routers send tokens; each expert's weights have two ranks, the dense ones four.
    "sharded × expert parallel": {
        "deepseek_v3": Case(Recipe("deepseek_v3", layers=(0, 1), num_experts=4, expert_parallel=2)),
        "overlapped experts": Case(
            Recipe("deepseek_v3", layers=MOE, num_experts=4, expert_parallel=2), chunks=("layers.*.moe", "seq")
        ),
    },
    # Over one rank nothing is reduced, and gradients are cast all the same.
    "pipeline alone": {"llama3": Case(Recipe("llama3", **STAGES))},
    "sharded × pipeline": {
        "llama3": Case(Recipe("llama3", **STAGES)),
        "graph_trainer's own passes": Case(Recipe("llama3", **STAGES), has_passes=False),  # a control
        # Weights' gradients of two microbatches are added in bfloat16 before they are cast.
        "backward in halves": Case(Recipe("llama3", **STAGES, schedule="ZBVZeroBubble")),
        "chunked loss": Case(Recipe("llama3", **STAGES, chunked_loss=True)),
    },
    "sharded × tensor parallel": {
        "llama3": Case(Recipe("llama3", layers=(0,), tensor_parallel=2)),
        "replicated": Case(Recipe("llama3", layers=(0,), num_replicas=2, tensor_parallel=2)),
        # Its loss is a DTensor.
        "chunked loss": Case(Recipe("llama3", tied=True, layers=(0,), chunked_loss=True, tensor_parallel=2)),
    },
}


def eager_of(cases: dict[str, Case], case: Case) -> str:
    """Names the first case of the same recipe and chunks, whose eager run serves all."""
    same = case.recipe, case.chunks
    return next(name for name, other in cases.items() if (other.recipe, other.chunks) == same)


def train_all(cases: dict[str, Case], folder: Path, ports: Sequence[int]) -> None:
    """Records each case, eagerly and by graph_trainer."""
    with as_torchrun(folder, ports) as begin:
        from torchtitan.experiments.graph_trainer.configs import EpOverlapConfig

        from graphpasses.integrations.torchtitan.chunks import chunked_trainer
        from graphpasses.integrations.torchtitan.cpu_configs import trainer_config
        from graphpasses.integrations.torchtitan.pass_pipeline import PIPELINE
        from graphpasses.parity.record_trainer import recorded

        for name, case in cases.items():
            for run, pipeline in (("eager", None), ("ours", PIPELINE)):
                if run == "eager" and name != eager_of(cases, case):
                    continue
                begin()
                config: Any = trainer_config(case.recipe, folder, NUM_STEPS, pipeline)
                if case.recipe.chunked_loss:
                    config.loss.num_chunks = NUM_CHUNKS
                if pipeline and not case.has_passes:
                    if case.recipe.pipeline_parallel > 1:
                        config.compile.pass_pipeline = "default"
                    else:
                        config.compile.enable_passes = False
                if pipeline and case.chunks:
                    modules, dim = case.chunks
                    config.compile.ep_overlap = EpOverlapConfig(
                        enabled=True,
                        strategy=STRATEGY,
                        module_fqn=modules,
                        chunk_dim=dim,
                        disable_early_grad_accumulation=True,  # else torchtitan 0.3.0 puts experts out of order
                    )
                for option, value in case.compile if pipeline else ():
                    setattr(config.compile, option, value)
                is_chunked = not pipeline and case.chunks
                trainer = chunked_trainer(config, *case.chunks) if is_chunked else config.build()
                with recorded(trainer, folder / f"{name} {run}.jsonl"):
                    trainer.train()
                if dict(case.compile).get("memory_policy") and pipeline:
                    targets = {str(node.target) for node in trainer._traced_step.gm.graph.nodes}
                    assert {"ao.offload.default", "ao.reload.default"} <= targets
                if "pass_pipeline" in dict(case.compile) and pipeline:  # kernels ran
                    assert len(trainer._traced_step.gm.graph.find_nodes(op="call_module")) > 9
                trainer.close()
                dist.destroy_process_group()


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_bits_of_eager(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    if "pipeline" in name and RELEASE != (2, 14):
        pytest.skip("torchtitan 0.3.0's pipelines need the schedules of torch 2.14")
    make_assets(tmp_path)
    cases = CASES[name]
    with stores(2 * len(cases)) as ports:
        run_ranks(train_all, 4 if "×" in name else 2, cases, tmp_path, ports)
    for case, how in cases.items():
        paths = (tmp_path / f"{eager_of(cases, how)} eager.jsonl", tmp_path / f"{case} ours.jsonl")
        eager, ours = map(read_run, paths)
        comparison = compare_runs(eager, ours)
        assert comparison.num_steps == NUM_STEPS
        assert comparison.equal == how.has_passes, case
        assert eager.steps[0].weights != eager.steps[-1].weights
        if how.chunks:  # a control: whole batches round otherwise
            whole = read_run(tmp_path / "deepseek_v3 eager.jsonl")
            assert not compare_runs(whole, ours).equal
        assert "(norm of all gradients)" in eager.steps[0].gradients
        assert not eager.passes
        assert bool(ours.passes) == how.has_passes
        assert eager.header.layouts
        if how.has_passes:
            assert ours.header.layouts
            assert not diff_layouts(eager.header.layouts, ours.header.layouts)
        if name != "pipeline alone":  # whose parameters one rank has
            assert all(any(each.graph_diff for each in report) for report in ours.passes.values())
        if not how.recipe.chunked_loss:  # whose weight is reduced apart from its other uses
            assert all("proved equal in bits, 0 not proved" in report.proof for report in ours.passes.values())


def test_weights_that_tensor_parallelism_unties_are_refused() -> None:
    """torchtitan ties them again only when FSDP2's groups were made."""
    pytest.importorskip("torchtitan")
    from graphpasses.integrations.torchtitan.eager_model import _check_ties

    tied, untied = LanguageModel(), LanguageModel(tied=False)
    _check_ties(IdentityMap.of(tied), LanguageModel(), False)
    _check_ties(IdentityMap.of(untied), LanguageModel(tied=False), False)
    with pytest.raises(UnsupportedError) as caught:
        _check_ties(IdentityMap.of(tied), untied, False)
    assert str(caught.value) == (
        "'emb.weight' and 'head.weight' are one tied weight, which torchtitan's tensor parallelism takes for several "
        "until FSDP2 has grouped them: eager reduces the gradients of each by themselves. Untie them "
        "(enable_weight_tying = False), compute the loss in chunks (ChunkedLossWrapper), or train with "
        "tensor_parallel_degree 1"
    )
    for model in (tied, untied):
        model.lm_head = model.head
        del model.head
    _check_ties(IdentityMap.of(tied), untied, True)


@pytest.mark.parametrize("is_refused", [True, False])
def test_eager_experts_that_lose_a_gradient_are_refused(is_refused: bool) -> None:
    """Whose bits: with sequence parallelism, eager's routed experts give no gradient to their input."""
    pytest.importorskip("torchtitan")
    from graphpasses.integrations.torchtitan.refusals import _refuse_lost_gradients

    model = nn.Module()
    model.moe = nn.Module()
    model.moe.token_dispatcher = object()
    trainer = SimpleNamespace(
        model_parts=[model],
        parallel_dims=SimpleNamespace(tp_enabled=True, ep_enabled=not is_refused),
        config=SimpleNamespace(parallelism=SimpleNamespace(enable_sequence_parallel=True)),
    )
    if not is_refused:
        _refuse_lost_gradients(trainer)
        return
    with pytest.raises(UnsupportedError) as caught:
        _refuse_lost_gradients(trainer)
    assert str(caught.value) == (
        "torchtitan's eager trainer loses the gradient of what 'moe' is given, since tensor parallelism gathers it "
        "out of autograd's sight (local_map); graph_trainer's trace has it, and trains otherwise. Use expert "
        "parallelism (--parallelism.expert_parallel_degree), train without tensor parallelism, or use another "
        "--compile.pass_pipeline"
    )


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        (
            "enable_async_tensor_parallel",
            True,
            "its fused kernels add in another order than eager's collectives",
        ),
        ("numerics_changing_optim", True, "it rounds otherwise than eager, as it says"),
        (
            "precompile_artifact_dir",
            "somewhere",
            "an artifact holds a graph that other passes have rewritten; the step must be traced",
        ),
    ],
)
def test_options_that_do_not_go_with_our_passes(option: str, value: object, why: str) -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    from graphpasses.integrations.torchtitan.pass_pipeline import _remember, graph_passes

    config = SimpleNamespace(compile=GraphTrainerCompileConfig())
    setattr(config.compile, option, value)
    trainer = SimpleNamespace(parallel_dims=SimpleNamespace(pp_enabled=False), config=config)
    refusals = (
        lambda: _remember(trainer),
        lambda: graph_passes(None, config),
    )  # both before the model is traced
    for refuse in refusals:
        with pytest.raises(UnsupportedError) as caught:
            refuse()
        assert str(caught.value) == (
            f"--compile.{option} does not go with --compile.pass_pipeline graphpasses: {why}. Leave that option out, "
            "or use another --compile.pass_pipeline"
        )


def test_trainers_that_ask_for_no_pipeline_are_refused() -> None:
    pytest.importorskip("torchtitan")
    from graphpasses.integrations.torchtitan.pass_pipeline import _remember

    trainer = SimpleNamespace(
        parallel_dims=SimpleNamespace(pp_enabled=False),
        config=SimpleNamespace(compile=SimpleNamespace(mode="jit")),
    )
    with pytest.raises(UnsupportedError) as caught:
        _remember(trainer)
    assert str(caught.value) == (
        "--compile.pass_pipeline graphpasses would do nothing: graph_trainer runs pipelines with --compile.mode "
        "aot_fx_trace, and the mode is 'jit'. Use that mode, or leave the pipeline out"
    )


@pytest.mark.parametrize(
    ("inductor", "has_stages", "option"),
    [
        ("full", False, "--compile.inductor_compilation full"),
        ("regional", True, "--parallelism.pipeline_parallel_degree above 1"),
    ],
)
def test_what_is_not_fused_exactly_is_refused(inductor: str, has_stages: bool, option: str) -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    from graphpasses.integrations.torchtitan.pass_pipeline import FUSED, _remember

    compile_config = GraphTrainerCompileConfig(pass_pipeline=FUSED, inductor_compilation=inductor)
    trainer = SimpleNamespace(
        parallel_dims=SimpleNamespace(pp_enabled=has_stages), config=SimpleNamespace(compile=compile_config)
    )
    with pytest.raises(UnsupportedError) as caught:
        _remember(trainer)
    assert str(caught.value) == (
        f"--compile.pass_pipeline graphpasses_fused does not go with {option}: leave that out, or use "
        "--compile.pass_pipeline graphpasses, which fuses nothing"
    )


def test_what_the_pipeline_leaves_to_others_or_leaves_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    from graphpasses.integrations.torchtitan.refusals import warn_of_options

    for changes in ({}, {"inductor_compilation": "full"}, {"enable_fsdp_dense_region_overlap": True}):
        warn_of_options(SimpleNamespace(compile=GraphTrainerCompileConfig(**changes)))
    record, other = caplog.records
    assert other.getMessage() == (
        "--compile.enable_fsdp_dense_region_overlap moves the buckets of torchtitan's own bucketing, which those of "
        "the pipeline graphpasses replace: collectives are launched where its prefetch-collectives puts them"
    )
    assert record.getMessage() == (
        "--compile.inductor_compilation full: Inductor compiles the whole graph that the pipeline graphpasses "
        "leaves, and may round otherwise than eager; what is proved is the graph that it is given"
    )


def test_pipeline_without_a_trainer() -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    from graphpasses.integrations.torchtitan.pass_pipeline import graph_passes

    with pytest.raises(UnsupportedError, match=r"^the pipeline graphpasses needs the trainer whose step"):
        graph_passes(None, SimpleNamespace(compile=GraphTrainerCompileConfig()))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_that_eager_does_not_shard_so_is_refused(tp: int) -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models import llama3

    from graphpasses.integrations.torchtitan.eager_model import eager_reference

    def refuse(model: nn.Module, *, parallelism: ParallelismConfig, **options: object) -> nn.Module:
        raise NotImplementedError(f"not {parallelism.spmd_backend}")

    spec = SimpleNamespace(name="graph_trainer/llama3", flavor="debugmodel")
    trainer = SimpleNamespace(
        config=SimpleNamespace(
            model_spec=spec,
            training=None,
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            dump_folder="",
        ),
        model_config=SimpleNamespace(build=lambda: nn.Linear(2, 2)),
        parallel_dims=ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=tp, pp=1, ep=1, world_size=tp),
    )
    eager = SimpleNamespace(parallelize_fn=refuse)
    with (
        mock.patch.object(llama3, "model_registry", return_value=eager),
        pytest.raises(UnsupportedError) as caught,
    ):
        eager_reference(trainer)
    other = "not spmd_types"
    if tp > 1:
        other = "'spmd_types' computes otherwise than graph_trainer where tensor_parallel_degree is not 1"
    assert str(caught.value) == (
        "the buckets of 'graph_trainer/llama3' are those of torchtitan's eager trainer, which does not shard this "
        f"model so (not partial_dtensor; {other}); change that, or use another --compile.pass_pipeline"
    )


def test_assets_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_assets(tmp_path / name)
    files = [sorted(p for p in (tmp_path / name).rglob("*") if p.is_file()) for name in ("a", "b")]
    assert [p.name for p in files[0]] == ["data.json", "tokenizer.json", "tokenizer_config.json"]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]
