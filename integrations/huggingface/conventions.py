"""Which masks a model is written for: sdpa's, or those of eager attention only.

sdpa's are boolean, and None where the module's `is_causal` says it all; eager's are numbers to add, and None means that every key
is seen. transformers lets a model name any registered implementation, one without sdpa too; the mask maker knows its config alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from .structure import constructor_says, own_attention, uses_interface

_found: dict[type, bool] = {}


@torch.compiler.assume_constant_result
def takes_eager_masks(config: type) -> bool:
    """True where a model with a config of this class takes eager's masks only.

    That is so where transformers names no sdpa for it, and something in its modeling file adds masks by itself, or leaves open
    whether its attention is causal.
    """
    if config not in _found:
        files = _modeling_files(config)
        if not files:
            return False  # not kept: the file may be imported later
        _found[config] = _eager_only(config, files)
    return _found[config]


@torch.compiler.assume_constant_result
def without_interface(config: type) -> bool:
    """True where no class of the config's modeling file calls its attention through transformers' AttentionInterface."""
    return not any(uses_interface(cls) for file in _modeling_files(config) for cls in file)


def _eager_only(config: type, files: list[list[type]]) -> bool:
    models = [cls for file in files for cls in file if hasattr(cls, "_supports_sdpa")]
    with_config = [cls for cls in models if getattr(cls, "config_class", None) is config]
    if all(cls._supports_sdpa for cls in with_config or models):
        return False
    classes = [cls for file in files for cls in file]
    attention = [cls for cls in classes if uses_interface(cls)]
    return not attention or not all(map(_is_plain_about_causality, attention)) or any(map(own_attention, classes))


def _is_plain_about_causality(cls: type) -> bool:
    return constructor_says(cls, "is_causal")


def _modeling_files(config: type) -> list[list[type]]:
    """The nn.Modules of each imported file that lies beside the config's own, or a base's, and holds a transformers model."""
    for base in config.__mro__:
        files = [found for found in _classes_beside(base) if any(hasattr(cls, "_supports_sdpa") for cls in found)]
        if files:
            return files
    return []


def _classes_beside(config: type) -> Iterator[list[type]]:
    package = config.__module__.rpartition(".")[0] + "."
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and "." not in name[len(package) :]:
            own = (value for value in list(vars(module).values()) if isinstance(value, type) and value.__module__ == name)
            yield [cls for cls in own if issubclass(cls, nn.Module)]
