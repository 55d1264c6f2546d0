"""Passes that are wrong on purpose: what they do must show in the bits."""

from __future__ import annotations

from graphpasses.pipeline import Pipeline


def wrong_pipeline(variant: str, pipeline: Pipeline) -> Pipeline:
    return pipeline
