"""Regions of a step that are compiled as one kernel each, because every operator in them is exact."""
