"""Small configurations: two layers, 64 wide, each just large enough for NCCL's rings to have an order."""

from __future__ import annotations

from experiments.architectures.inputs import VOCAB

__all__ = ["GPT2_SIZES", "GROUPED", "SEQ2SEQ_SIZES", "SIZES", "TOKENS"]

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

SIZES = {
    **TOKENS,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 176,
    "use_cache": False,
}

GROUPED = {**SIZES, "num_key_value_heads": 2}
"""Two heads of queries share a head of keys and values."""

GPT2_SIZES = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "use_cache": False,
}

SEQ2SEQ_SIZES = {
    **TOKENS,
    "decoder_start_token_id": 2,
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 176,
    "decoder_ffn_dim": 176,
    "max_position_embeddings": 32,
    "use_cache": False,
}
