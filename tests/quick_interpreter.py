"""The interpreter in fewer steps: about a third of its time went into the things below, and none tells a test anything.

It holds every sum and product of 32-bit integers against the same in 64 bits; a number that does not fit is wrong here as on a GPU,
and is seen as a wrong result or, with tests/bounds.py, as an access outside the tensors. It makes a table of NumPy's types anew
at every step, one of the constants of its shape for every value, and holds the size of every value against that of its type. For every launch,
and every call of a function like tl.sum in one, it looks up the functions of triton.language and puts its own in their place. And it
takes a kernel's source apart twice, once for the number of a line.

One thing is mended: it makes the bits of an integer those of a bfloat16, where a GPU makes the number.
"""

import inspect
import linecache
import math
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
    _mend_bfloat16_of_integers(interpreter.InterpreterBuilder, tl)
    _share_shapes(tl.core)
    _patch_once(interpreter, tl)
    interpreter.FunctionRewriter._get_jit_fn_file_line = lambda rewriter: _place_of(rewriter.fn.__code__)


def _mend_bfloat16_of_integers(builder, tl) -> None:
    """Convert integers to bfloat16 by way of float32."""
    cast = builder.cast_impl

    def to_fp(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16:
            wide = tl.block_type(tl.float32, dst_type.shape) if dst_type.is_block() else tl.float32
            src = cast(self, src, wide)
        return cast(self, src, dst_type)

    builder.create_si_to_fp = builder.create_ui_to_fp = to_fp


def _place_of(code) -> tuple[str, int]:
    """Return the file of a kernel and the line of its ``def``, which decorators precede."""
    file, first = code.co_filename, code.co_firstlineno
    return file, next((n for n in range(first, first + 100) if linecache.getline(file, n).lstrip().startswith("def ")), first)


def _share_shapes(core) -> None:
    """Have values of one shape share its constants, and types of one shape and element what they hold; nothing writes to either."""
    make, types = core.block_type.__init__, {}

    @cache
    def constants(shape: tuple[int, ...]):
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    def init(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(tuple(type.shape) if type.is_block() else ())

    def init_type(self, element_ty, shape) -> None:
        key = element_ty, tuple([n.value if type(n) is core.constexpr else n for n in shape])
        if type(element_ty) is not core.dtype or key not in types:
            make(self, element_ty, shape)
        if type(element_ty) is core.dtype:
            vars(self).update(types.setdefault(key, dict(vars(self))))

    core.tensor.__init__, core.block_type.__init__ = init, init_type


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
