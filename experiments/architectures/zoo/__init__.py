"""All architectures of the table."""

from __future__ import annotations

from experiments.architectures.zoo.audio import AUDIO
from experiments.architectures.zoo.decoders import DECODERS
from experiments.architectures.zoo.encoder_decoders import ENCODER_DECODERS
from experiments.architectures.zoo.encoders import ENCODERS
from experiments.architectures.zoo.experts import EXPERTS
from experiments.architectures.zoo.images import IMAGES
from experiments.architectures.zoo.state_spaces import STATE_SPACES

__all__ = ["ARCHITECTURES"]

ARCHITECTURES = (*DECODERS, *EXPERTS, *STATE_SPACES, *ENCODERS, *ENCODER_DECODERS, *IMAGES, *AUDIO)
