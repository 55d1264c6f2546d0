"""Passes that choose which kernels run."""
