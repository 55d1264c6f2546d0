"""Collectives of a graph: in which order they may run, what ranks agree on about them, how they are packed."""
