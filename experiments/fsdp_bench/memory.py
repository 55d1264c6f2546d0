"""Peak resident memory of training steps, of variants that each have processes of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from experiments.fsdp_bench.steps import EAGER, WHOLE, fsdp2_transformer, loss_fn
from experiments.harness.resident import forget_peak, peak_resident, resident
from graphpasses.capture import capture_train_step
from graphpasses.passes import default_pipeline

__all__ = ["Memory", "measure_memory"]


@dataclass(frozen=True)
class Memory:
    """What one rank held.

    Args:
        num_parameters: of the whole model.
        before: bytes that were resident before the model was built: Python, torch.
        peak: bytes that were resident at most in the steps, after two that are not counted.
    """

    num_parameters: int
    before: int
    peak: int


def measure_memory(variant: str, num_layers: int, dim: int, num_steps: int = 3) -> Memory:
    """Trains a model on this rank and measures its memory; all ranks call it together.

    Args:
        variant: eager FSDP2, or the step captured from that model, with its optimizer or without.
        num_layers: layers of the model.
        dim: its width.
        num_steps: counted steps: forward, backward and AdamW.

    Returns:
        The largest of all ranks.
    """
    vocab = 8 * dim
    before = resident()
    model = fsdp2_transformer(num_layers, dim, vocab)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, vocab, (2, 65), generator=generator) for _ in range(2 + num_steps)]
    given = optimizer if variant == WHOLE else None
    step = (
        None
        if variant == EAGER
        else default_pipeline().run(capture_train_step(loss_fn, model, batches[0], optimizer=given))
    )
    for index, tokens in enumerate(batches):
        if index == 2:
            forget_peak()
        if step is None:
            loss_fn(model, tokens).backward()
        else:
            step(tokens)
        if variant != WHOLE:
            optimizer.step()
            optimizer.zero_grad()
    sizes = torch.tensor([before, peak_resident()])
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    return Memory(sum(parameter.numel() for parameter in model.parameters()), *sizes.tolist())
