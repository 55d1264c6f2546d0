"""A cluster's wire on one machine: collectives take as long as there, without using the processor."""
