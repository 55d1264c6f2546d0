"""Models of speech and sound."""

from __future__ import annotations

import functools

from experiments.architectures.architecture import Architecture, with_recording_hooks
from experiments.architectures.inputs import (
    NUM_CLASSES,
    NUM_MELS,
    VOCAB,
    classified_spectrograms,
    classified_waves,
    spoken_waves,
    transcribed_spectrograms,
)
from experiments.architectures.zoo.sizes import SEQ2SEQ_SIZES, SIZES

__all__ = ["AUDIO"]

_WAVES = {
    **SIZES,
    "vocab_size": VOCAB,
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "num_labels": NUM_CLASSES,
}
_FIXED_DEPTH = {"layerdrop": 0.0, "apply_spec_augment": False}
_SPANS = {"mask_time_prob": 0.2, "mask_time_length": 4}

_audio = functools.partial(Architecture, family="audio")
_waves = functools.partial(
    _audio, model="Wav2Vec2ForSequenceClassification", options=_WAVES | _FIXED_DEPTH, inputs=classified_waves
)

AUDIO = (
    _audio(
        "whisper",
        model="WhisperForConditionalGeneration",
        options={
            **{name: value for name, value in SEQ2SEQ_SIZES.items() if name != "max_position_embeddings"},
            "num_mel_bins": NUM_MELS,
            "max_source_positions": 32,
            "max_target_positions": 32,
        },
        inputs=transcribed_spectrograms,
    ),
    _audio(
        "audio_spectrogram_transformer",
        model="ASTForAudioClassification",
        options={
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 176,
            "patch_size": 8,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 32,
            "num_mel_bins": NUM_MELS,
            "num_labels": NUM_CLASSES,
        },
        inputs=classified_spectrograms,
    ),
    _waves(
        "wav2vec2, CTC",
        model="Wav2Vec2ForCTC",
        inputs=spoken_waves,
        refused="CaptureError: loss_fn calls aten._ctc_loss.Tensor",
    ),
    _waves(
        "wav2vec2, layers and spans dropped",
        options=_WAVES | _SPANS | {"layerdrop": 0.3},
        refused="CaptureError: loss_fn decides by a tensor's value",
    ),
    _waves(
        "wav2vec2, spans dropped",
        options=_WAVES | _SPANS | {"layerdrop": 0.0},
        prepare=with_recording_hooks,
        refused="CaptureError: loss_fn draws random numbers of numpy.random",
    ),
    _waves("hubert", model="HubertForSequenceClassification", prepare=with_recording_hooks),
)
