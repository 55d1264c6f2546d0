"""Makes any configuration of transformers small: by what its attributes are called, not by its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.architectures.inputs import VOCAB
from experiments.architectures.zoo.sizes import TOKENS

__all__ = ["small_config"]

NUM_LAYERS = 2
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
    "num_layers_per_stack",
)
"""What the number of layers is called; the first that there is counts those that lists have an entry for."""
_PLACES = ("full_attn_idxs", "moe_layers", "hybrid_layer_ids", "cross_attention_layers", "mlp_only_layers")
"""Lists of numbers of layers."""
_SWITCHES = {"use_cache": False, "is_decoder": True}

_SIZES = {
    VOCAB: """vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input shape_vocab_size
        pronunciation_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base""",
    128: """mamba_d_ssm intermediate_size ffn_dim n_inner dff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size
        feed_forward_size dim_ff d_inner intermediate_size_mlp dense_intermediate_size mlp_dim""",
    64: """hidden_size d_model n_embd embedding_size input_embedding_size output_embedding_size emb_dim
        embedding_dim word_embed_proj_dim lru_width backbone_hidden_size hidden_size_global
        pronunciation_embed_dim shape_embed_dim ple_embed_dim ext_pw_out_channel depthwise_separable_out_channel
        nemo_conv_channels output_channels max_position_embeddings n_positions n_ctx max_seq_len
        context_length max_target_positions max_source_positions model_max_length image_size""",
    32: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size shared_experts_intermediate_size kv_lora_rank q_lora_rank o_lora_rank
        adapter_rank hc_lowrank hidden_size_per_layer_input router_hidden_size attention_head_dim""",
    16: """head_dim global_head_dim d_head swa_head_dim dim_head attention_head_size v_head_dim kv_channels
        index_head_dim mamba_d_head mamba_head_dim mamba_headdim linear_head_dim linear_key_head_dim
        linear_value_head_dim""",
    8: """qk_rope_head_dim qk_nope_head_dim sliding_window sliding_window_size attention_window_size
        window_size local_attention rotary_dim mamba_d_state state_size ssm_state_size chunk_size mamba_chunk_size
        block_size index_topk index_block_size num_heads n_groups mamba_n_heads mamba_num_heads prompt_length
        split_ngram_parts""",
    4: """num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_query_groups
        num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads
        index_n_heads zero_expert_num""",
    2: """num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads o_groups moe_topk
        num_experts_per_tok num_experts_per_token moe_top_k moe_k layer_group_size attn_layer_period
        expert_layer_period global_attn_every_n_layers num_kv_shared_layers""",
    1: """n_group topk_group num_expert_group attn_layer_offset expert_layer_offset first_k_dense_replace
        num_dense_layers n_shared_experts""",
}
"""Whatever its type, a number of such a name is at most so large."""

_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}


_NEEDED = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
"""What some types leave to each checkpoint's configuration, and cannot be built without."""

_CHECKPOINTS_OWN: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "ReformerConfig": {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32)},
    "XmodConfig": {"default_language": "en_XX"},
    # A block is tied to one that comes after it, so there must be two.
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""By class: what its default configuration lacks besides."""


def small_config(config_class: Any) -> Any:
    """Returns a configuration like the default one of its class, but small.

    Args:
        config_class: its class.
    """
    return _small(config_class())


def _small(config: Any) -> Any:
    given = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    num_layers = next((given[name] for name in _LAYERS if given.get(name)), 0)
    kept = _layers_of_each_kind(given, num_layers)
    options = {key: _smaller(key, value, num_layers, kept) for key, value in given.items()}
    if given.get("kv_lora_rank"):  # the heads of latent attention share one key, which alone is rotated
        options["num_key_value_heads"] = options["num_attention_heads"]
        options["head_dim"] = options["qk_rope_head_dim"]
    options = {key: value for key, value in options.items() if value is not given.get(key)}
    return type(config)(**options | _CHECKPOINTS_OWN.get(type(config).__name__, {}))


def _layers_of_each_kind(given: Mapping[str, Any], num_layers: int) -> list[int]:
    """Returns the places of the layers that are kept: one of each kind, and two at least."""
    lists = [value for key, value in given.items() if _is_of_layers(key, value, num_layers)]
    kinds = {str([each[place] for each in lists]): place for place in reversed(range(num_layers))}
    return sorted({*kinds.values(), *range(NUM_LAYERS)})


def _is_of_layers(key: str, value: Any, num_layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == num_layers > 0 and key not in _PLACES


def _smaller(key: str, value: Any, num_layers: int, kept: list[int]) -> Any:
    if hasattr(value, "model_type"):
        return _small(value)
    if isinstance(value, dict):
        return {name: _smaller(name, item, num_layers, kept) for name, item in value.items()}
    if key in _SWITCHES:
        return _SWITCHES[key]
    if key in _PLACES and value is not None:
        return [new for new, old in enumerate(kept) if old in value]
    if _is_of_layers(key, value, num_layers):
        return type(value)(_smaller(key, value[place], num_layers, kept) for place in kept)
    if value is None and key in _NEEDED:
        return _SIZE_OF[key]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if key in _LAYERS:
        return len(kept)
    if key.endswith(("_token_id", "_token_index")):
        return TOKENS.get(key, 0)
    return min(value, _SIZE_OF.get(key, value))
