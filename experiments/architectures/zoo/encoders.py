"""Models that read a text as a whole."""

from __future__ import annotations

import functools
from typing import Any

from experiments.architectures.architecture import Architecture
from experiments.architectures.inputs import NUM_CLASSES, VOCAB, classified_tokens, padded_tokens, tokens
from experiments.architectures.zoo.sizes import SIZES, TOKENS

__all__ = ["ENCODERS"]

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_CLASSES = {"num_labels": NUM_CLASSES}


def _only_the_head(model: Any) -> None:
    model.bert.requires_grad_(False)


def _only_biases(model: Any) -> None:
    for name, parameter in model.bert.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


_encoder = functools.partial(Architecture, family="encoder", inputs=tokens)

ENCODERS = (
    _encoder("bert, dropout", model="BertForMaskedLM", options=SIZES, inputs=padded_tokens),
    _encoder("bert, only biases train", model="BertForMaskedLM", options=SIZES, prepare=_only_biases),
    _encoder(
        "bert, only the head trains",
        model="BertForSequenceClassification",
        options=SIZES | _CLASSES,
        inputs=classified_tokens,
        prepare=_only_the_head,
    ),
    _encoder("roberta, dropout", model="RobertaForMaskedLM", options=SIZES),
    _encoder(
        "xlm_roberta, dropout",
        model="XLMRobertaForSequenceClassification",
        options=SIZES | _CLASSES,
        inputs=classified_tokens,
    ),
    _encoder(
        "distilbert, dropout",
        model="DistilBertForMaskedLM",
        options={"vocab_size": VOCAB, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 176},
    ),
    _encoder(
        "albert, one layer three times",
        model="AlbertForMaskedLM",
        options=SIZES | {"num_hidden_layers": 3, "embedding_size": 32},
    ),
    _encoder("electra", model="ElectraForMaskedLM", options=SIZES | _NO_DROPOUT | {"embedding_size": 32}),
    _encoder(
        "deberta_v2, dropout",
        model="DebertaV2ForMaskedLM",
        options=SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    _encoder("modernbert", model="ModernBertForMaskedLM", options=SIZES | {"attn_implementation": "sdpa"}),
    _encoder("longformer", model="LongformerForMaskedLM", options=SIZES | _NO_DROPOUT | {"attention_window": 4}),
    _encoder(
        "funnel",
        model="FunnelForMaskedLM",
        options={
            "vocab_size": VOCAB,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 64,
            "n_head": 4,
            "d_head": 16,
            "d_inner": 176,
        },
    ),
    _encoder(
        "reformer",
        model="ReformerForMaskedLM",
        options={
            **TOKENS,
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "attention_head_size": 16,
            "num_attention_heads": 4,
            "feed_forward_size": 176,
            "attn_layers": ["local", "lsh"],
            "axial_pos_shape": [4, 4],
            "axial_pos_embds_dim": [32, 32],
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "num_buckets": 4,
            "max_position_embeddings": 16,
        },
        refused="eager: RuntimeError: aten.native_layer_norm.default got mixed torch.Tensor and DTensor",
    ),
    _encoder(
        "perceiver",
        model="PerceiverForMaskedLM",
        options={
            "vocab_size": VOCAB,
            "num_latents": 8,
            "d_latents": 64,
            "d_model": 64,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 64,
            "v_channels": 64,
            "max_position_embeddings": 16,
        },
    ),
)
