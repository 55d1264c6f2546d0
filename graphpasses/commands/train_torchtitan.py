"""``torchtitan.train`` with the pass pipeline ``graphpasses`` registered.

::

    torchrun … -m graphpasses.commands.train_torchtitan --module graph_trainer.llama3 --config … \\
        --compile.pass_pipeline graphpasses

``graphpasses_fused`` is the pipeline whose exact operators run as one kernel.
Before torchtitan's arguments, ``--record FILE`` writes hashes of every step, for ``graphpasses compare``, and
``--canonical`` gives weights the same bits on any number of ranks; also those of torchtitan's eager trainers. With
``--any-expert-degree`` experts have them on any number of ranks that share them, too, and gradients are reduced in
bfloat16; give it on all clusters.
``--chunks MODULES DIM`` lets an eager trainer run modules on two chunks, to compare with ``--compile.ep_overlap``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main(args: Sequence[str] | None = None) -> None:
    """Runs ``torchtitan.train`` with the pipeline registered, and as its options say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--record", type=Path)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--canonical", action="store_true")
    how.add_argument("--chunks", nargs=2)
    parser.add_argument("--any-expert-degree", action="store_true")
    ours, theirs = parser.parse_known_args(args)
    if torch.accelerator.is_available() and not hasattr(dist, "set_timeout"):
        parser.error("on a GPU torchtitan 0.3.0 needs torch 2.14 or newer, whose torch.distributed has set_timeout")
    if ours.any_expert_degree and not ours.canonical:
        parser.error("--any-expert-degree goes with --canonical")
    sys.argv[1:] = theirs
    from torchtitan import train, trainer

    import graphpasses.integrations.torchtitan.pass_pipeline  # noqa: F401  registers the pipeline
    from graphpasses.integrations.torchtitan.any_cluster import canonical_trainer
    from graphpasses.integrations.torchtitan.chunks import chunked_trainer
    from graphpasses.parity.record_trainer import recorded

    if ours.canonical or ours.chunks:

        def build(config: Any) -> Any:
            del trainer.Trainer.Config.build
            if ours.chunks:
                return chunked_trainer(config, *ours.chunks)
            if ours.any_expert_degree:
                config.training.mixed_precision_reduce = "bfloat16"  # an option that knows float32 alone
            return canonical_trainer(config, any_expert_degree=ours.any_expert_degree)

        trainer.Trainer.Config.build = build
    if ours.record is not None:
        run = trainer.Trainer.train

        def run_recorded(self: Any) -> None:
            with recorded(self, ours.record):
                run(self)

        trainer.Trainer.train = run_recorded
    train.main()


if __name__ == "__main__":
    main()
