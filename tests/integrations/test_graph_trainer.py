"""torchtitan's own trainers on real ranks: eager FSDP2 and graph_trainer with our pipeline have the same weights."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from graphpasses.errors import UnsupportedError
from graphpasses.identity import IdentityMap
from graphpasses.integrations.titan_cpu import make_assets, use_cpu
from graphpasses.parity.hashing import weight_hashes
from graphpasses.parity.launch import run_ranks
from tests.models import LanguageModel

NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """What a model is trained like."""

    is_tied: bool = False
    is_hybrid: bool = False
    is_tensor_parallel: bool = False
    has_passes: bool = True


CASES = {
    "sharded": {
        "llama3": Case(),
        "llama3 tied": Case(is_tied=True),
        # A control: as traced, a tied weight's gradients are reduced one by one, and then added.
        "no passes": Case(is_tied=True, has_passes=False),
    },
    # By itself: DTensor's caches take meshes of other groups, but of equal ranks and names, for one.
    "hybrid": {"llama3 tied": Case(is_tied=True, is_hybrid=True)},
    "sharded × tensor parallel": {"llama3": Case(is_tensor_parallel=True)},
}


def configure(case: Case, folder: Path, *, is_eager: bool) -> Any:
    """Returns torchtitan's debug configuration, for a few small steps."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.experiments.graph_trainer import llama3 as graph_llama3
    from torchtitan.experiments.graph_trainer.common_utils import build_decoder_config_for_backend
    from torchtitan.experiments.graph_trainer.configs import (
        GraphTrainerCompileConfig,
        to_graph_trainer_config,
    )
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import llama3_configs, model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    def graph_model(flavor: str, **options: Any) -> Any:
        spec = graph_llama3.model_registry(flavor, attn_backend="sdpa")
        spec.model.enable_weight_tying = case.is_tied
        return spec

    config = llama3_debugmodel()
    spec = model_registry("debugmodel")
    spec.model = build_decoder_config_for_backend(
        llama3_configs["debugmodel"], "sdpa", tp_gemm_backend="default"
    )
    spec.model.enable_weight_tying = case.is_tied
    config.model_spec = spec if is_eager else graph_model("debugmodel")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    config.hf_assets_path = str(folder / "tests" / "assets" / "tokenizer")
    config.dataloader.dataset_path = str(folder / "tests" / "assets" / "c4_test")
    config.dump_folder = str(folder / "out")
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 64, 1, NUM_STEPS
    config.lr_scheduler.warmup_steps = 0
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.data_parallel_replicate_degree = 2 if case.is_hybrid else 1
    config.parallelism.tensor_parallel_degree = 2 if case.is_tensor_parallel else 1
    config.activation_checkpoint = None
    config.debug.seed, config.debug.deterministic = 42, True
    if is_eager:
        return config
    config = to_graph_trainer_config(config, graph_model)
    config.compile = GraphTrainerCompileConfig(
        enable=True, pass_pipeline="graphpasses", enable_passes=case.has_passes
    )
    return config


def train(case: Case, folder: Path, port: int, *, is_eager: bool) -> list[dict[str, str]]:
    """Returns hashes of the weights after each step."""
    os.environ["MASTER_PORT"] = str(port)
    trainer = configure(case, folder, is_eager=is_eager).build()
    step, hashes = trainer.train_step, []

    def train_step(batches: Any) -> None:
        step(batches)
        hashes.append(weight_hashes(trainer.model_parts[0]))

    trainer.train_step = train_step
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
    return hashes


def compare(cases: dict[str, Case], folder: Path, ports: list[int]) -> dict[str, list[object]]:
    """Returns, for each case, whether the weights are equal after each step, and whether they were trained."""
    warnings.simplefilter("ignore")  # torchtitan's
    logging.disable(logging.WARNING)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # each trainer makes its own
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(size) for name, size in sizes.items()}, MASTER_ADDR="localhost")
    use_cpu()
    import graphpasses.integrations.graph_trainer  # noqa: F401

    results: dict[str, list[object]] = {}
    for name, case in cases.items():
        eager, captured = (train(case, folder, ports.pop(), is_eager=is_eager) for is_eager in (True, False))
        equal = [ours == theirs for ours, theirs in zip(captured, eager, strict=True)]
        results[name] = [equal, len(eager) == NUM_STEPS and eager[0] != eager[-1]]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return results


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.parametrize("name", CASES)
def test_bits_of_eager(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    make_assets(tmp_path)
    cases = CASES[name]
    for results in run_ranks(compare, 4, cases, tmp_path, free_ports(2 * len(cases))):
        assert results == {case: [[cases[case].has_passes] * NUM_STEPS, True] for case in cases}


def test_weights_that_tensor_parallelism_unties_are_refused() -> None:
    """torchtitan ties them again only when FSDP2's groups were made."""
    pytest.importorskip("torchtitan")
    from graphpasses.integrations.graph_trainer import _check_ties

    tied, untied = LanguageModel(), LanguageModel(tied=False)
    _check_ties(IdentityMap.of(tied), LanguageModel())
    _check_ties(IdentityMap.of(untied), LanguageModel(tied=False))
    with pytest.raises(UnsupportedError) as caught:
        _check_ties(IdentityMap.of(tied), untied)
    assert str(caught.value) == (
        "'emb.weight' and 'head.weight' are one tied weight, which torchtitan's tensor parallelism takes for several "
        "until FSDP2 has grouped them: eager reduces the gradients of each by themselves. Untie them "
        "(enable_weight_tying), or train with tensor_parallel_degree 1"
    )


def test_assets_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_assets(tmp_path / name)
    files = [sorted(p for p in (tmp_path / name).rglob("*") if p.is_file()) for name in ("a", "b")]
    assert [p.name for p in files[0]] == ["data.json", "tokenizer.json", "tokenizer_config.json"]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]
