"""Peak resident memory of training steps, of variants that each have processes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from experiments.fsdp_bench.steps import EAGER, UNCHECKED, WHOLE, fsdp2_transformer, loss_fn
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
        first: bytes that were resident at most before the counted steps: in the capture with its check, and in two
            steps.
        peak: bytes that were resident at most in the counted steps.
    """

    num_parameters: int
    before: int
    first: int
    peak: int


def measure_memory(variant: str, num_layers: int, dim: int, num_steps: int = 3) -> Memory:
    """Trains a model on this rank and measures its memory; all ranks call it together.

    Args:
        variant: eager FSDP2, or the step captured from that model, with its optimizer, compared with eager or not, or
            without.
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
    batches = [torch.randint(0, vocab, (1, 17), generator=generator) for _ in range(2 + num_steps)]
    forget_peak()
    given = optimizer if variant in (WHOLE, UNCHECKED) else None
    captured = partial(capture_train_step, check=variant != UNCHECKED)
    step = None if variant == EAGER else default_pipeline().run(captured(loss_fn, model, batches[0], optimizer=given))
    first = 0
    for index, tokens in enumerate(batches):
        if index == 2:
            first = peak_resident()
            forget_peak()
        if step is None:
            loss_fn(model, tokens).backward()
        else:
            step(tokens)
        if given is None:
            optimizer.step()
            optimizer.zero_grad()
    sizes = torch.tensor([before, first, peak_resident()])
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    return Memory(sum(parameter.numel() for parameter in model.parameters()), *sizes.tolist())
