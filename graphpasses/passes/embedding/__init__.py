"""Passes for models with embedding tables."""
