"""What the server of ranks imports once: torchtitan, which asks for a device when it is imported."""

from __future__ import annotations

import warnings

from graphpasses.commands.train_torchtitan_on_cpu import use_cpu

use_cpu()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchtitan.experiments.graph_trainer.trainer
    import torchtitan.train  # noqa: F401  loaded here, where its warnings are ignored

    import graphpasses.integrations.torchtitan.pass_pipeline
    import graphpasses.parity.record_trainer  # noqa: F401  loaded here, as the one above
