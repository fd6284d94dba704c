"""Fused GPU kernels for PyTorch, compiled from a few lines of mathematics."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

__version__ = "0.2.0"

# A checkout has some folders of the package beside this one; an install has them inside. Python started in a checkout prefers this
# folder to any install, and finds them this way.
if not (Path(__file__).parent / "integrations").exists():
    __path__.append(str(Path(__file__).parents[1]))

#: public name -> (module, attribute); loaded on first use to keep the import cheap
_LAZY = {
    "DTError": ("dtkernels.lang.errors", "DTError"),
    "compile": ("dtkernels.runtime.bind.compiled_program", "compile"),
    "ops": ("dtkernels.ops", None),
    "register": ("dtkernels.ops", "register"),
    "fuse": ("dtkernels.frontend", "fuse"),
    "attention_spec": ("dtkernels.ops.attention_forms.user_spec", "attention_spec"),
    "explain": ("dtkernels.ops.warmup_and_explain", "explain"),
    "warmup": ("dtkernels.ops.warmup_and_explain", "warmup"),
    "paths": ("dtkernels.runtime.path_counters", "paths"),
    "nn": ("dtkernels.nn", None),
    "integrations": ("dtkernels.integrations", None),
    "apply_to": ("dtkernels.integrations.huggingface", "apply_to"),
    "compile_backend": ("dtkernels.integrations.torch_compile", "compile_backend"),
    "inductor_options": ("dtkernels.integrations.torch_compile", "inductor_options"),
    "replacements": ("dtkernels.integrations.torch_compile", "replacements"),
    "patched": ("dtkernels.integrations.huggingface", "patched"),
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'dtkernels' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if "torch" in sys.modules:  # load the ops now, in milliseconds, rather than during a first call
    importlib.import_module("dtkernels.ops")
