"""All types of causal language models that the installed transformers registers, each with a small configuration."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from experiments.architectures.architecture import Architecture, transformers_offline
from experiments.architectures.inputs import coded_tokens, image_and_tokens, tokens
from experiments.architectures.registry.shrink import small_config

_OTHER_INPUTS = {"git": image_and_tokens, "musicgen": coded_tokens, "musicgen_melody": coded_tokens}
"""Of types to which a text alone is nothing."""

__all__ = ["Registered", "registered"]


@dataclass(frozen=True)
class Registered(Architecture):
    """A type of the registry; its options are found when it is built, from its own default configuration."""

    def build(self) -> nn.Module:
        """Returns the model in training mode; its weights are random, nothing is downloaded."""
        model_class = getattr(transformers_offline(), self.model)
        model: nn.Module = model_class(small_config(model_class.config_class)).train()
        self.prepare(model)
        return model


@functools.cache
def registered() -> tuple[Registered, ...]:
    """Returns every type of ``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES``."""
    transformers_offline()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: dict[str, Any] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return tuple(
        Registered(name, "registry", model, {}, _OTHER_INPUTS.get(name, tokens)) for name, model in names.items()
    )
