"""Integrations with other libraries. Each imports its library only when it is used."""

import importlib

_PACKAGES = ("huggingface", "peft", "torch_compile")


def __getattr__(name: str):
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*_PACKAGES, *(name for name in globals() if name.startswith("__"))})
