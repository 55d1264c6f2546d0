"""What must be believed of a proof: numbers of values, the memory where they lie, what results depend on.

**Theorem.** Two graphs are evaluated on the numbers of one table. Where an output, or a tensor from outside
that a step writes, has one number in both, it has the same bits after both, on every batch, for every state
of model, optimizer and random numbers, and on every rank, if

1. an operator's result depends on no more than its key has: its name and arguments; the values, dtypes,
   shapes, strides and devices of its operands; how far each begins behind a multiple of 64 bytes, unless it
   computes element by element (:mod:`~graphpasses.proof.core.operators`); of one that draws random numbers,
   on those drawn before;
2. torch allocates at multiples of 64 bytes, and inputs lie where they lie in both steps;
3. fake tensors share storage where real ones do, with their strides and offsets: from these, and from no
   schema, it is read what a write changes (:mod:`~graphpasses.proof.core.facts`,
   :mod:`~graphpasses.proof.core.memory`). What an operator writes its schema says;
4. each rule that is registered is true of all numbers that its axiom names
   (:mod:`~graphpasses.proof.core.operators`). One assumption is common to them: of a NaN only that it is one is
   compared, not its sign and payload, and no operator looks at these; denormals are not flushed;
5. all ranks launch the same collectives, in one order; certificates are compared for it.

Numbers compare bits: constants by dtype and bits, attributes by what they held before the first pass ran.
Nothing follows where numbers differ; that two values *do* differ is shown by running both, not here.

Beside this folder, which imports nothing of the rest, one must believe the rules of point 4, that
:mod:`~graphpasses.proof.evaluate` with :mod:`~graphpasses.proof.calls` asks the right ones, and that
:mod:`~graphpasses.proof.prove` compares all outputs, writes and checks.
"""
