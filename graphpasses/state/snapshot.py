"""All that a step holds constant, as it was when it was captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from graphpasses.errors import CaptureError
from graphpasses.state.model import ModelStructure
from graphpasses.state.settings import settings_of
from graphpasses.state.slots import AGAIN, Owner

_SINCE = " when the step was captured"
_IN_BATCH = "give it in the batch, as a tensor, or capture the step again"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a graph has built in, and each call of its step checks."""

    structure: ModelStructure  # modules, ties, which parameters are trained
    settings: tuple[Owner, ...]  # of torch and of FSDP2's groups
    # Of the model's modules, and of objects that these hold: those forward read.
    attributes: tuple[Owner, ...] = ()
    names: tuple[Owner, ...] = ()  # values from outside that the step's code reads

    @classmethod
    def of(cls, model: nn.Module, attributes: Sequence[Owner] = (), names: Sequence[Owner] = ()) -> Snapshot:
        """Reads a model's structure and the settings; attributes and names were read before."""
        return cls(ModelStructure.of(model), settings_of(model), tuple(attributes), tuple(names))

    def check(self, model: nn.Module) -> list[torch.Tensor | None]:
        """Raises if something is not what it was, and names it: eager would follow, and the graph would not.

        Returns the model's parameters and buffers, by slot of the structure.
        """
        tensors = self.structure.check(model)
        for owners, advice in ((self.attributes, AGAIN), (self.settings, AGAIN), (self.names, _IN_BATCH)):
            for owner in owners:
                if (found := owner.difference()) is not None:
                    raise CaptureError(f"{found.text(_SINCE)}; {advice}")
        return tensors

    def for_model(self, model: nn.Module) -> Snapshot:
        """Returns the same of another model; raises where that is not built as this one was."""
        structure = self.structure.for_model(model)
        others = dict(zip(map(id, self.structure.modules), structure.modules, strict=True))
        known: dict[int, Owner] = {}
        for owner in self.attributes:
            if id(owner.value) in others:
                other = others[id(owner.value)]
                if (found := owner.difference(other, alike=True)) is not None:
                    raise CaptureError(f"{found.text(_SINCE)}; {AGAIN}")
                owner.of(other, known)
        return Snapshot(structure, settings_of(model), tuple(known.values()), self.names)
