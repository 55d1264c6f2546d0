"""Mixtures of experts: which weights a token meets depends on its values."""

from __future__ import annotations

import functools

from experiments.architectures.architecture import Architecture, with_recording_hooks
from experiments.architectures.inputs import VOCAB, tokens
from experiments.architectures.zoo.sizes import GROUPED, SEQ2SEQ_SIZES, SIZES

__all__ = ["EXPERTS"]

_FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_experts = functools.partial(Architecture, family="mixture of experts", inputs=tokens)

EXPERTS = (
    _experts("mixtral", model="MixtralForCausalLM", options=GROUPED | {"num_local_experts": 4}),
    _experts(
        "qwen2_moe, router loss",
        model="Qwen2MoeForCausalLM",
        options=GROUPED | _FOUR | {"shared_expert_intermediate_size": 64, "output_router_logits": True},
        prepare=with_recording_hooks,
    ),
    _experts(
        "qwen3_moe",
        model="Qwen3MoeForCausalLM",
        options=GROUPED | _FOUR | {"head_dim": 16},
    ),
    _experts("olmoe", model="OlmoeForCausalLM", options=GROUPED | _FOUR),
    _experts("granitemoe", model="GraniteMoeForCausalLM", options=GROUPED | {"num_local_experts": 4}),
    _experts(
        "gpt_oss",
        model="GptOssForCausalLM",
        options=GROUPED | {"num_local_experts": 4, "head_dim": 16},
    ),
    _experts(
        "deepseek_v3",
        model="DeepseekV3ForCausalLM",
        options={
            **SIZES,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    _experts(
        "switch_transformers",
        model="SwitchTransformersForConditionalGeneration",
        options={
            "vocab_size": VOCAB,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 176,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "num_experts": 4,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        refused="eager: AssertionError: FSDP reduce-scatter expects uniform gradient dtype",
    ),
    _experts(
        "nllb_moe",
        model="NllbMoeForConditionalGeneration",
        options=SEQ2SEQ_SIZES
        | {
            "num_experts": 4,
            "router_dtype": "bfloat16",
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
        refused="CaptureError: forward converts or moves a module",
    ),
)
