"""Proofs that a rewritten step has the bits of the step that it was made from.

:mod:`~graphpasses.proof.prove` compares two graphs that :mod:`~graphpasses.proof.evaluate` has evaluated on the
numbers of :mod:`~graphpasses.proof.values`; :mod:`~graphpasses.proof.axioms` says what is taken for granted.
"""
