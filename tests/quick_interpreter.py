"""The interpreter in fewer steps: about a quarter of its time went into the two things below, and neither tells a test anything.

It holds every sum and product of 32-bit integers against the same in 64 bits; a number that does not fit is wrong here as on a GPU,
and is seen as a wrong result or, with tests/bounds.py, as an access outside the tensors. And it makes a table of NumPy's types anew
at every step.
"""

from dataclasses import replace


def install() -> None:
    """Change the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, numpy_type, known = interpreter.interpreter_builder, interpreter._get_np_dtype, {}
    builder.options = replace(builder.options, sanitize_overflow=False)

    def remembered(of):
        if type(of) is not tl.dtype:
            return numpy_type(of)
        if of.name not in known:
            known[of.name] = numpy_type(of)
        return known[of.name]

    interpreter._get_np_dtype = remembered
