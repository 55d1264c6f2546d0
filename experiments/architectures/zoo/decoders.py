"""Language models that read from left to right."""

from __future__ import annotations

import functools
from typing import Any

from experiments.architectures.architecture import Architecture
from experiments.architectures.inputs import VOCAB, padded_tokens, tokens
from experiments.architectures.zoo.sizes import GPT2_SIZES, GROUPED, SIZES

__all__ = ["DECODERS"]

_TIED = {"tie_word_embeddings": True}


def _checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _frozen_embeddings(model: Any) -> None:
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)


_decoder = functools.partial(Architecture, family="decoder", inputs=tokens)

DECODERS = (
    _decoder("llama", model="LlamaForCausalLM", options=GROUPED),
    _decoder("llama, tied", model="LlamaForCausalLM", options=GROUPED | _TIED),
    _decoder("llama, padded", model="LlamaForCausalLM", options=GROUPED, inputs=padded_tokens),
    _decoder("llama, checkpointed", model="LlamaForCausalLM", options=GROUPED, prepare=_checkpointed),
    _decoder("llama, not resharded", model="LlamaForCausalLM", options=GROUPED, reshard=False),
    _decoder("mistral", model="MistralForCausalLM", options=GROUPED | {"sliding_window": 8}),
    _decoder("qwen2, tied", model="Qwen2ForCausalLM", options=GROUPED | _TIED),
    _decoder("qwen3, tied", model="Qwen3ForCausalLM", options=GROUPED | _TIED | {"head_dim": 16}),
    _decoder("gemma, tied", model="GemmaForCausalLM", options=SIZES | {"num_key_value_heads": 1, "head_dim": 16}),
    _decoder("gemma2, tied", model="Gemma2ForCausalLM", options=GROUPED | {"head_dim": 16}),
    _decoder("phi", model="PhiForCausalLM", options=SIZES),
    _decoder("phi3", model="Phi3ForCausalLM", options=SIZES),
    _decoder("olmo2", model="Olmo2ForCausalLM", options=SIZES),
    _decoder("stablelm", model="StableLmForCausalLM", options=SIZES | {"num_key_value_heads": 4}),
    _decoder("cohere, tied", model="CohereForCausalLM", options=SIZES),
    _decoder("granite", model="GraniteForCausalLM", options=GROUPED),
    _decoder("gpt2, dropout", model="GPT2LMHeadModel", options=GPT2_SIZES),
    _decoder("gpt2, frozen embeddings", model="GPT2LMHeadModel", options=GPT2_SIZES, prepare=_frozen_embeddings),
    _decoder("gpt_bigcode, dropout", model="GPTBigCodeForCausalLM", options=GPT2_SIZES),
    _decoder("gpt_neox", model="GPTNeoXForCausalLM", options=SIZES),
    _decoder("gptj", model="GPTJForCausalLM", options=GPT2_SIZES | {"rotary_dim": 8}),
    _decoder("codegen", model="CodeGenForCausalLM", options=GPT2_SIZES | {"rotary_dim": 8}),
    _decoder(
        "opt, dropout",
        model="OPTForCausalLM",
        options={
            **{name: SIZES[name] for name in SIZES if name != "intermediate_size"},
            "ffn_dim": 176,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 32,
        },
    ),
    _decoder(
        "bloom, tied",
        model="BloomForCausalLM",
        options={"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, "use_cache": False},
    ),
    _decoder("falcon", model="FalconForCausalLM", options=SIZES),
)
