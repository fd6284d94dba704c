"""Read from the compiled code of a model's classes how they compute attention. There is no list of model names."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # how every modeling file calls transformers' AttentionInterface
OURS = ("transformers", "dtkernels")  #: the packages whose implementations compute what an op computes
Answer = TypeVar("Answer")
More = ParamSpec("More")


def once_a_class(function: Callable[Concatenate[type, More], Answer]) -> Callable[Concatenate[type, More], Answer]:
    """Cache the answers of a function of a class. For the type checker a subclass of ``nn.Module`` is not the Hashable that ``cache`` asks for."""
    return cast("Callable[Concatenate[type, More], Answer]", cache(function))


def _functions(cls: type) -> Iterator[FunctionType]:
    """Return the functions defined in `cls` and its bases up to nn.Module, without decorators."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch" or base is object or base.__name__ == "PreTrainedModel":
            continue
        for attribute in vars(base).values():
            attribute = getattr(attribute, "__func__", attribute)  # static and class methods
            function = inspect.unwrap(attribute) if inspect.isfunction(attribute) else None
            if inspect.isfunction(function):
                yield function


@once_a_class
def names_in(cls: type) -> frozenset[str]:
    """Return every name that the functions of `cls` and its bases read, globals and attributes alike."""
    return frozenset(name for function in _functions(cls) for name in function.__code__.co_names)


@once_a_class
def uses_interface(cls: type) -> bool:
    """Return whether a class calls its attention through transformers' AttentionInterface."""
    return _INTERFACE in names_in(cls)


@once_a_class
def interface_of(cls: type) -> object | None:
    """Return the AttentionInterface that a class calls, which its modeling file may have made itself, or None."""
    return next((f.__globals__[_INTERFACE] for f in _functions(cls) if _INTERFACE in f.__code__.co_names and _INTERFACE in f.__globals__), None)


@once_a_class
def eager_function(cls: type) -> Callable | None:
    """Return the modeling file's own eager attention, as `cls` names it when it calls the interface, or None."""
    return eager_function_now(cls)


def eager_function_now(cls: type) -> Callable | None:
    """Return the same as the modeling file has it now, which somebody may have replaced."""
    for function in _functions(cls):
        names = function.__code__.co_names
        if _INTERFACE in names:
            for name in names:
                if name.endswith("eager_attention_forward") and name in function.__globals__:
                    return function.__globals__[name]
    return None


@once_a_class
def own_attention(cls: type) -> bool:
    """Return whether a class seems to compute attention by itself: it takes a mask and calls softmax."""
    for function in _functions(cls):
        code = function.__code__
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if "softmax" in code.co_names and any("mask" in name for name in parameters) and _INTERFACE not in code.co_names:
            return True
    return False


@once_a_class
def sets_its_mask(cls: type) -> bool:
    """Return whether a function that calls the interface first reassigns a mask among its arguments."""
    for function in _functions(cls):
        code = function.__code__
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        masks = {name for name in parameters if "mask" in name} if _INTERFACE in code.co_names else set()
        for instruction in dis.get_instructions(function) if masks else ():
            stored = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            if instruction.opname.startswith("STORE_FAST") and masks.intersection(stored):
                return True
    return False


@once_a_class
def constructor_says(cls: type, attribute: str) -> bool:
    """Return whether an `__init__` of the class sets `attribute` to a value that is not its argument of that name."""
    for function in _functions(cls):
        code = function.__code__
        if function.__name__ == "__init__" and attribute in code.co_names:
            return attribute not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return False


@once_a_class
def implementations_compared(cls: type) -> frozenset[str]:
    """Return the attention implementations that the class compares its config's with: `config._attn_implementation == "sdpa"`.

    Such code behaves differently for every other name, "dtkernels" included.
    """
    found: set[str] = set()
    for function in _functions(cls):
        instructions = list(dis.get_instructions(function))
        for attribute, constant in zip(instructions, instructions[1:], strict=False):
            if attribute.argval == "_attn_implementation":
                names = constant.argval if isinstance(constant.argval, tuple | frozenset) else (constant.argval,)
                found.update(name for name in names if isinstance(name, str))
    return frozenset(found)


@once_a_class
def gives_weights(cls: type) -> bool:
    """Return whether a model's forward puts `attentions` into its output even if nobody asks for them."""
    function: Any = getattr(cls, "forward", None)
    captured = False
    while not captured and hasattr(function, "__wrapped__"):
        captured = function.__globals__["__name__"].endswith("output_capturing")  # hooks collect them on request
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if captured or code is None:
        return False
    given = any("attentions" in names for names in code.co_consts if isinstance(names, tuple))
    return given and not {"output_attentions", "attentions"}.intersection(code.co_varnames + code.co_names)


def package_of(function: Any) -> str:
    """Return the package of a function's code: functools.wraps copies the __module__ of what it wraps."""
    while isinstance(function, partial):
        function = function.func
    scope = getattr(function, "__globals__", None)
    module = str(scope.get("__name__")) if isinstance(scope, dict) else type(function).__module__
    return module.partition(".")[0]
