"""Proofs that a rewritten step has the bits of the step that it was made from."""
