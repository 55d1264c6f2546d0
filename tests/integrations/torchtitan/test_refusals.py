"""Trainers and steps whose bits would not be eager's are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphpasses.errors import UnsupportedError

pytest.importorskip("torchtitan")


def test_a_frozen_parameter_that_graph_trainer_trains_is_refused() -> None:
    from graphpasses.integrations.torchtitan.eager_model import _check_trained

    model, eager = nn.Linear(2, 2), nn.Linear(2, 2)
    _check_trained(model, eager)
    eager.weight.requires_grad_(False)
    with pytest.raises(UnsupportedError) as caught:
        _check_trained(model, eager)
    assert str(caught.value) == (
        "torchtitan's graph trainer trains 'weight', its eager trainer keeps it frozen: SimpleFSDP makes new "
        "parameters, all of them trainable. Use another --compile.pass_pipeline, or train eagerly"
    )


class OfPositions:
    def __call__(self, pred: Any, labels: Any, valid: Any, *, positions: Any = None) -> Any:
        return pred.sum()


class OfRest:
    def __call__(self, pred: Any, labels: Any, valid: Any, **rest: Any) -> Any:
        return pred.sum() * rest["positions"].sum()


class OfNone:
    def __call__(self, pred: Any, labels: Any, valid: Any, **rest: Any) -> Any:
        del rest
        return pred.sum()


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("loss", [OfPositions, OfRest, OfNone])
def test_losses_that_read_positions_are_refused(loss: type, is_chunked: bool) -> None:
    """Eager's trainer gives them the batch's positions, graph_trainer does not."""
    from torchtitan.components.loss import ChunkedLossWrapper

    from graphpasses.integrations.torchtitan.refusals import _refuse_other_loss

    given = loss()
    if is_chunked:
        given = ChunkedLossWrapper.__new__(ChunkedLossWrapper)
        given.loss_fn = loss()

    def step(*paths: str) -> Any:
        return SimpleNamespace(batch_structure=SimpleNamespace(paths=paths))

    _refuse_other_loss(given, step("batch[0]", "batch[1]"))
    with_positions = step("batch[0]", "batch[3]['positions']")
    if loss is OfNone:
        _refuse_other_loss(given, with_positions)
        return
    with pytest.raises(UnsupportedError) as caught:
        _refuse_other_loss(given, with_positions)
    assert str(caught.value) == (
        f"the loss {loss.__name__} may read the batch's positions, which torchtitan's eager trainer gives it and "
        "graph_trainer does not: they would train otherwise. Let it take none (and no **kwargs that it reads), or "
        "use another --compile.pass_pipeline"
    )


@pytest.mark.parametrize("dim", [1, 0])
def test_parameters_that_eager_shards_otherwise_are_refused(dim: int) -> None:
    from graphpasses.integrations.torchtitan.refusals import _refuse_other_shards

    info = SimpleNamespace(shard_dim=dim, shape=(4, 4), shard_ranks=(0, 1))
    entry = SimpleNamespace(fqn="weight", shard_dim=0)
    step: Any = SimpleNamespace(parameters={"weight": info})
    layout: Any = SimpleNamespace(buckets=[SimpleNamespace(entries=[entry])])
    if dim == 0:
        _refuse_other_shards(step, layout)
        return
    with pytest.raises(UnsupportedError) as caught:
        _refuse_other_shards(step, layout)
    assert str(caught.value).startswith(
        "torchtitan's eager trainer shards 'weight' of shape (4, 4) as Shard(0), graph_trainer as Shard(1)"
    )


@pytest.mark.parametrize("is_other", [True, False])
def test_wrapper_classes_of_an_earlier_model_are_refused(is_other: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from graphpasses import simple_fsdp
    from graphpasses._torch.fake_process_group import fake_process_group
    from graphpasses.integrations.torchtitan.refusals import _refuse_other_dtypes

    training = SimpleNamespace(mixed_precision_param="bfloat16", mixed_precision_reduce="float32")
    dtype = torch.float32 if is_other else torch.bfloat16
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,))
        model = simple_fsdp(nn.Linear(2, 2), mesh, param_dtype=dtype, reduce_dtype=torch.float32)
        trainer = SimpleNamespace(config=SimpleNamespace(training=training), model_parts=[model])
        if not is_other:
            _refuse_other_dtypes(trainer)
            return
        with pytest.raises(UnsupportedError) as caught:
            _refuse_other_dtypes(trainer)
    assert str(caught.value) == (
        "SimpleFSDP gathers 'weight' in torch.float32 and reduces its gradient in torch.float32, as for an earlier "
        "model of this process, whose classes it keeps; --training.mixed_precision_param and mixed_precision_reduce "
        "are torch.bfloat16 and torch.float32. Make one trainer in a process, or import "
        "graphpasses.integrations.torchtitan.pass_pipeline before the first"
    )


def test_a_pipeline_that_does_not_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig

    from graphpasses.integrations.torchtitan.refusals import warn_of_options

    for enable in (True, False):
        warn_of_options(SimpleNamespace(compile=GraphTrainerCompileConfig(enable_passes=enable)))
    (record,) = caplog.records
    assert record.getMessage() == (
        "--compile.enable_passes False: the pipeline graphpasses does nothing, and the step runs as it was traced: "
        "nothing is proved, and where weights are tied or rings reorder it has other bits than eager's"
    )
