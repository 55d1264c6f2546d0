"""What a row of the table trains: a model of transformers, from a small random configuration, and its inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

__all__ = [
    "Architecture",
    "Family",
    "Inputs",
    "everything_trains",
    "transformers_offline",
    "with_recording_hooks",
]

Family = Literal[
    "decoder",
    "mixture of experts",
    "state space",
    "encoder",
    "encoder-decoder",
    "vision",
    "image and text",
    "audio",
    "registry",
]

Inputs = Callable[[torch.Generator], dict[str, Any]]
"""Draws the keyword arguments of forward, labels included, from a generator."""


def transformers_offline() -> Any:
    """Imports transformers, silent and without network."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def everything_trains(model: nn.Module) -> None:
    """Changes nothing."""


def with_recording_hooks(model: nn.Module) -> None:
    """Installs the hooks that transformers 5 otherwise installs in the first forward that needs them."""
    from graphpasses.integrations.transformers import install_recording_hooks

    install_recording_hooks(model)


@dataclass(frozen=True)
class Architecture:
    """A model, how it is built and what it is given.

    Args:
        name: of the row.
        family: what kind of model it is.
        model: the class in ``transformers``; its configuration class is read from it.
        options: of the configuration.
        inputs: what forward is called with; it returns a loss.
        prepare: freezes parts, turns on checkpointing or the like, as a user would before ``fully_shard``.
        compute: dtype of the unsharded parameters.
        reshard: ``reshard_after_forward`` of ``fully_shard``.
        refused: how the refusal begins, if the model must be refused; empty if its bits must be eager's.
    """

    name: str
    family: Family
    model: str
    options: Mapping[str, Any]
    inputs: Inputs
    prepare: Callable[[Any], object] = everything_trains
    compute: torch.dtype = torch.bfloat16
    reshard: bool = True
    refused: str = ""

    def build(self) -> nn.Module:
        """Returns the model in training mode; its weights are random, nothing is downloaded."""
        model_class = getattr(transformers_offline(), self.model)
        model: nn.Module = model_class(model_class.config_class(**self.options)).train()
        self.prepare(model)
        return model
