"""Capture a training step as one graph."""

from graphpasses.capture.simple_fsdp import simple_fsdp
from graphpasses.capture.train_step import capture_train_step, from_traced_result

__all__ = ["capture_train_step", "from_traced_result", "simple_fsdp"]
