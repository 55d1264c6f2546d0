"""Sharding with torchtitan's SimpleFSDP, without what its ``data_parallel`` loses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphpasses._torch.fake_process_group import fake_process_group
from graphpasses._torch.tested_versions import RELEASE
from graphpasses.capture import simple_fsdp
from graphpasses.errors import UnsupportedError
from graphpasses.graph.parameters import get_state
from graphpasses.identity import IdentityMap
from tests.helpers.fsdp2_cases import DEFAULT_REDUCE_DTYPE
from tests.helpers.models import (
    Even,
    LanguageModel,
    captured_fsdp,
    frozen,
    make_mesh,
)


def test_keeps_ties_and_frozen_parameters() -> None:
    model = frozen()
    identity = IdentityMap.of(model)
    requires_grad = {fqn: p.requires_grad for fqn, p in model.named_parameters()}
    with fake_process_group(4):
        assert simple_fsdp(model, make_mesh()) is model
        assert IdentityMap.of(model) == identity
        assert {fqn: p.requires_grad for fqn, p in model.named_parameters()} == requires_grad
        assert get_state(model, "head.weight") is get_state(model, "emb.weight")
        assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())


def test_hybrid_replicates_then_shards() -> None:
    with fake_process_group(4):
        model = simple_fsdp(LanguageModel(), make_mesh(hybrid=True))
        assert {p.placements for p in model.parameters()} == {(Replicate(), Shard(0))}


def test_shards_on_another_dim() -> None:
    with fake_process_group(4):
        model = simple_fsdp(Even(), make_mesh(), shard_dim=1)
        assert {p.placements for p in model.parameters()} == {(Shard(1),)}


def test_reduce_dtype_defaults_to_fsdp2s() -> None:
    """The dtype of compute, or from torch 2.15 on that of the parameters."""
    for options, expected in (
        ({"param_dtype": torch.bfloat16, "reduce_dtype": None}, DEFAULT_REDUCE_DTYPE),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, torch.float32),
        ({"param_dtype": None, "reduce_dtype": None}, torch.float32),
    ):
        with fake_process_group(4):
            graph = captured_fsdp(Even(), **options)
        scatters = graph.graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.reduce_scatter_tensor.default
        )
        assert {node.meta["val"].dtype for node in scatters} == {expected}


@pytest.mark.skipif(RELEASE < (2, 15), reason="FSDP2 of this torch adds gradients as SimpleFSDP does")
def test_additions_that_are_not_fsdp2s() -> None:
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16}
    end = (
        "in reduce_dtype torch.float16 already; SimpleFSDP does not. Capture the model that fully_shard sharded, or "
        "reduce in torch.bfloat16"
    )
    with fake_process_group(4):
        with pytest.raises(UnsupportedError) as caught:
            simple_fsdp(nn.Linear(4, 4), make_mesh(), **options)
        assert str(caught.value) == (
            "the gradients of parameter 'weight' are computed in torch.bfloat16, and from torch 2.15 on FSDP2 adds "
            f"those of its uses {end}"
        )
        simple_fsdp(nn.Linear(4, 4), make_mesh(), param_dtype=torch.bfloat16)  # the near miss


@pytest.mark.skipif(RELEASE < (2, 15), reason="FSDP2 of this torch reduces in the dtype of compute")
def test_no_one_default() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))
    with fake_process_group(4), pytest.raises(UnsupportedError) as caught:
        simple_fsdp(model, make_mesh(), param_dtype=torch.bfloat16)
    assert str(caught.value) == (
        "the model has trainable parameters of several dtypes, torch.float32, torch.float64, and FSDP2 reduces "
        "gradients in that of their parameters; say in which with reduce_dtype"
    )


def test_does_not_reuse_an_earlier_models_wrapper() -> None:
    """torchtitan keeps the first wrapper per class; a second model would reduce as the first does."""
    with fake_process_group(4):
        captured_fsdp(Even(), reduce_dtype=torch.float32)
        graph = captured_fsdp(Even(), reduce_dtype=torch.bfloat16)
    scatters = graph.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.reduce_scatter_tensor.default
    )
    assert {node.meta["val"].dtype for node in scatters} == {torch.bfloat16}


def test_three_axes_are_refused() -> None:
    with fake_process_group(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        with pytest.raises(UnsupportedError) as caught:
            simple_fsdp(LanguageModel(), mesh)
    assert str(caught.value) == "simple_fsdp takes a mesh of one axis (FSDP) or two (HSDP), not 3"


def test_dims_that_a_parameter_lacks_are_refused() -> None:
    with fake_process_group(4), pytest.raises(UnsupportedError) as caught:
        simple_fsdp(LanguageModel(), make_mesh(), shard_dim=1)
    assert str(caught.value) == (
        "parameter 'layers.0.gain' has 1 dims and cannot be sharded on dim 1; use shard_dim=0"
    )


def test_scalars_are_refused() -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    with fake_process_group(4), pytest.raises(UnsupportedError) as caught:
        simple_fsdp(model, make_mesh())
    assert str(caught.value) == (
        "parameter 'scale' is 0-d and cannot be sharded; make it 1-d (numel 1), as FSDP2 asks too"
    )
