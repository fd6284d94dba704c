"""The interpreter in fewer steps: about a third of its time went into the things below, and none tells a test anything.

It holds every sum and product of 32-bit integers against the same in 64 bits; a number that does not fit is wrong here as on a GPU,
and is seen as a wrong result or, with tests/bounds.py, as an access outside the tensors. It makes a table of NumPy's types anew
at every step, and holds the size of every value against that of its type. And for every launch, and every call of a function like tl.sum
in one, it looks up the functions of triton.language and puts its own in their place.
"""

import inspect
from dataclasses import replace
from functools import cache


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
    interpreter.TensorHandle.__post_init__ = lambda self: None
    _patch_once(interpreter, tl)


def _patch_once(interpreter, tl) -> None:
    """Look for the functions to replace once, and replace them once for a launch."""
    patch, patch_attr, replaced = interpreter._patch_lang, interpreter._patch_attr, set()

    @cache
    def builtins(package) -> list[tuple[str, object]]:
        return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch_builtins(package, builder, scope) -> None:
        for name, member in builtins(package):
            patch_attr(package, name, member, builder, scope)

    class Scope:
        """What a launch replaced; a call within a launch restores nothing."""

        def __init__(self, fn):
            self.inner, found = None, fn.__globals__.values()
            needed = {lang.__name__ for lang in (tl, tl.core) if any(value is lang for value in found)}
            if not needed or not needed <= replaced:
                self.inner = patch(fn)
                replaced.update(needed)

        def restore(self) -> None:
            if self.inner is not None:
                self.inner.restore()
                replaced.clear()

    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins(package)  # as they are before any is replaced
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtins, Scope
