"""graph_trainer's own configurations are read from its sources, each once; the page says what came of each."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
from experiments.graph_trainer_configs.page import make_page
from experiments.graph_trainer_configs.upstream import Configuration, configurations
from experiments.harness.outcome import Outcome


@pytest.fixture(scope="module")
def known() -> dict[str, Configuration]:
    found = configurations()
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def test_both_suites_are_read(known: dict[str, Configuration]) -> None:
    integration = known["aot_fx_trace_llama3_fsdp_tp_sac_and_offload"]
    assert (integration.num_ranks, integration.is_disabled) == (8, False)
    numerics = known["test_moe_qwen3_aot_fx_trace_vs_eager"]
    assert (numerics.num_ranks, numerics.is_disabled) == (8, False)
    assert known["test_dense_llama3_jit_vs_eager"].is_disabled
    schedules = [name for name in known if name.startswith("test_graph_pp_moe_dsv3_aot_fx_trace_vs_eager ")]
    assert [name.split()[1] for name in schedules] == ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]


def test_what_two_tests_train_is_there_once(known: dict[str, Configuration]) -> None:
    """The numerics test of llama3 has the options of an integration test, in another order."""
    assert "aot_fx_trace_llama3_fsdp_tp" in known
    assert "test_dense_llama3_aot_fx_trace_vs_eager" not in known


def test_eager_options(known: dict[str, Configuration]) -> None:
    assert known["aot_fx_trace_llama3_fsdp_tp_sac_and_offload"].eager_options == (
        *("--module", "llama3", "--config", "llama3_debugmodel"),
        *("--parallelism.data_parallel_shard_degree", "4", "--parallelism.tensor_parallel_degree", "2"),
    )
    assert known["test_moe_qwen3_aot_fx_trace_vs_eager"].eager_options[:4] == (
        *("--module", "qwen3", "--config", "qwen3_moe_debug"),
    )


def test_chunks(known: dict[str, Configuration]) -> None:
    """Eager is trained with the chunks of ``--compile.ep_overlap``."""
    overlapped = known["test_moe_dsv3_ep_overlap_moe_seq_aot_fx_trace_vs_eager_chunked"]
    assert overlapped.chunks == ("layers.*.moe", "seq")
    assert known["aot_fx_trace_llama3_fsdp_tp"].chunks is None


def test_what_inductor_compiles(known: dict[str, Configuration]) -> None:
    compiled = [name for name, each in known.items() if each.is_compiled]
    assert [name.partition("_v3_")[2] for name in compiled] == [
        "flexattn_full_inductor_ep_overlap_transformer_batch",
        "flexattn_full_inductor_ep_overlap_moe_batch",
        "flexattn_full_inductor_ep_overlap_moe_seq",
        "graph_pp_interleaved_1f1b_full_inductor",
        "graph_pp_zbv_zero_bubble_full_inductor",
        "graph_pp_dual_pipe_v_full_inductor",
    ]


def test_page() -> None:
    one, other = (
        Configuration(name, ("--module", "m", "--config", "c"), 4, is_disabled)
        for name, is_disabled in (("one", False), ("other", True))
    )
    lines = make_page({one: Outcome("bits"), other: Outcome("refused", "why")}).splitlines()
    start = lines.index("Of 2 configurations: 1 bits, 1 refused.")
    assert lines[start:] == [
        "Of 2 configurations: 1 bits, 1 refused.",
        "",
        "| test | ranks | upstream runs it | result |",
        "|---|---:|---|---|",
        "| `one` | 4 | yes | bits |",
        "| `other` | 4 | no | refused [1] |",
        "",
        "## Messages",
        "",
        "1. `why`",
    ]


def test_the_page_in_the_docs_has_every_configuration(known: dict[str, Configuration]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "graph_trainer_configs.md").read_text()
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == list(known)
    assert "not run" not in page
