"""Models with an encoder whose output every layer of a decoder reads."""

from __future__ import annotations

import functools

from experiments.architectures.architecture import Architecture
from experiments.architectures.inputs import VOCAB, translated_tokens
from experiments.architectures.zoo.sizes import SEQ2SEQ_SIZES

__all__ = ["ENCODER_DECODERS"]

_NO_DROPOUT = {"dropout": 0.0}
_T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 176,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}

_both = functools.partial(Architecture, family="encoder-decoder", inputs=translated_tokens, options=SEQ2SEQ_SIZES)

ENCODER_DECODERS = (
    _both("t5, tied, dropout", model="T5ForConditionalGeneration", options=_T5_SIZES),
    _both(
        "mt5, gated",
        model="MT5ForConditionalGeneration",
        options=_T5_SIZES | {"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"},
    ),
    _both("bart", model="BartForConditionalGeneration", options=SEQ2SEQ_SIZES | _NO_DROPOUT),
    _both("bart, dropout", model="BartForConditionalGeneration"),
    _both(
        "bart, layers dropped",
        model="BartForConditionalGeneration",
        options=SEQ2SEQ_SIZES | {"encoder_layerdrop": 0.3},
        refused="CaptureError: loss_fn decides by a tensor's value",
    ),
    _both("marian, dropout", model="MarianMTModel"),
    _both("pegasus, dropout", model="PegasusForConditionalGeneration"),
    _both("mbart, dropout", model="MBartForConditionalGeneration"),
    _both(
        "m2m_100",
        model="M2M100ForConditionalGeneration",
        options=SEQ2SEQ_SIZES | _NO_DROPOUT | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    ),
    _both(
        "led",
        model="LEDForConditionalGeneration",
        options={
            **{name: value for name, value in SEQ2SEQ_SIZES.items() if name != "max_position_embeddings"},
            **_NO_DROPOUT,
            "max_encoder_position_embeddings": 32,
            "max_decoder_position_embeddings": 32,
            "attention_window": 4,
        },
    ),
)
