"""Models with a state instead of attention, or beside it."""

from __future__ import annotations

import functools

from experiments.architectures.architecture import Architecture
from experiments.architectures.inputs import VOCAB, tokens
from experiments.architectures.zoo.sizes import GROUPED, TOKENS

__all__ = ["STATE_SPACES"]

_SIZES = {**TOKENS, "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "use_cache": False}

_state_space = functools.partial(Architecture, family="state space", inputs=tokens)

STATE_SPACES = (
    _state_space("mamba, tied", model="MambaForCausalLM", options=_SIZES | {"state_size": 8}),
    _state_space(
        "mamba2",
        model="Mamba2ForCausalLM",
        options=_SIZES | {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    ),
    _state_space("falcon_mamba", model="FalconMambaForCausalLM", options=_SIZES | {"state_size": 8}),
    _state_space("rwkv", model="RwkvForCausalLM", options=_SIZES | {"context_length": 32}),
    _state_space(
        "recurrent_gemma",
        model="RecurrentGemmaForCausalLM",
        options=GROUPED | {"num_hidden_layers": 3, "attention_window_size": 8},
    ),
)
