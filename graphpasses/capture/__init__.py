"""Capture a training step as one graph."""

from graphpasses.capture.simple_fsdp import simple_fsdp as simple_fsdp
from graphpasses.capture.train_step import capture_train_step as capture_train_step
