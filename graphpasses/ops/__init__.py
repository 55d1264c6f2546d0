"""Our own operators, one idea a file.

A file has, side by side: the reference (a public function), the fake kernel, the backward if there is one, and last
the operator, which :func:`~graphpasses.ops.define.define_operator` makes of them. The reference is ``pack_bags``; the
operator, which graphs call, is ``PACK_BAGS``.

What returns its own argument, or writes in backward, cannot be an operator, and is in ``autograd_functions.py``.
"""
