"""A decoder of our own and Hugging Face's Llama, small, and their loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.fsdp_parity.models import VOCAB, gpt

__all__ = ["blocks", "decoder", "llama", "loss_fn"]


def decoder() -> nn.Module:
    """LayerNorm, biases, embedding and head tied, dropout."""
    model = gpt()
    model.layers[0] = nn.Sequential(nn.Dropout(0.1), model.layers[0])
    return model


def llama() -> nn.Module:
    """Hugging Face's, with fewer heads of keys than of queries."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that ``fully_shard`` is called with before the root."""
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList))
    return list(next(lists))


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy of a microbatch, in fp32."""
    logits = model(tokens[:, :-1])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
