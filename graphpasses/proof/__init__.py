"""Proofs that a rewritten step has the bits of the step that it was made from.

:mod:`~graphpasses.proof.core` says what is proved, and what must be believed for it. The rules that say more
of operators are axioms, each tested on random bits: :mod:`~graphpasses.proof.movement` of what moves
elements, on the maps of :mod:`~graphpasses.proof.pieces`; :mod:`~graphpasses.proof.elements` of what computes
each alone; :mod:`~graphpasses.proof.spelling` of what is written in several ways. What they make of other
sources :mod:`~graphpasses.proof.terms` lists, with how it is run.
"""
