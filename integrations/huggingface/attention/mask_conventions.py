"""Determine which masks a model expects: sdpa's, or those of eager attention only.

sdpa's masks are boolean, or None if the module's `is_causal` says everything. Eager's masks are numbers to add; None means that every
key is seen. transformers lets a model name any registered implementation, even one without sdpa; the mask maker sees only its config.
"""

from __future__ import annotations

import inspect
import re
import sys

import torch
from torch import nn
from transformers import PreTrainedModel

from ..patching.source_inspection import constructor_says, implementations_compared, own_attention, sets_its_mask, uses_interface

_found: dict[type, bool] = {}
_by_name: dict[type, bool] = {}
_writing: dict[type, bool] = {}
_without_files: dict[type, int] = {}  # config -> how many modules were imported when no file was found for it

_WRITTEN = re.compile(r'''mask\w*(\[[^"'\n][^\n]*\]\s*([-+*|&]?=[^=])|\s*[-+*|&]=|\.\w+_\()''')  # mask[...] = , mask &= , mask.fill_(


@torch.compiler.assume_constant_result
def takes_eager_masks(config: type) -> bool:
    """Return whether a model with a config of this class takes eager's masks only.

    This holds if transformers declares no sdpa support for it, and a class of its modeling file adds masks by itself, changes the
    masks that it is given, or leaves open whether its attention is causal.
    """
    if config not in _found:
        if _without_files.get(config) == len(sys.modules):
            return False
        files = _modeling_files(config)
        if not files:
            _without_files[config] = len(sys.modules)  # the file may be imported later
            return False
        _found[config] = _eager_only(config, files)
    return _found[config]


@torch.compiler.assume_constant_result
def knows_sdpa_by_name(config: type) -> bool:
    """Return whether a class of the config's modeling file checks if the implementation is called "sdpa".

    Such a class may rely on a mask that is None, for which it has no other sign.
    """
    if config not in _by_name:
        _by_name[config] = any("sdpa" in implementations_compared(cls) for file in _modeling_files(config) for cls in file)
    return _by_name[config]


@torch.compiler.assume_constant_result
def writes_masks(config: type) -> bool:
    """Return whether the config's modeling file may change a mask in place, or cannot be found."""
    if config not in _writing:
        names = {cls.__module__ for file in _modeling_files(config) for cls in file}
        _writing[config] = not names or any(map(_writes, names))
    return _writing[config]


def _writes(module: str) -> bool:
    try:
        return _WRITTEN.search(inspect.getsource(sys.modules[module])) is not None
    except (OSError, TypeError):  # no source
        return True


@torch.compiler.assume_constant_result
def without_interface(config: type) -> bool:
    """Return whether no class of the config's modeling file calls its attention through transformers' AttentionInterface."""
    return not any(uses_interface(cls) for file in _modeling_files(config) for cls in file)


def _eager_only(config: type, files: list[list[type]]) -> bool:
    models = [cls for file in files for cls in file if hasattr(cls, "_supports_sdpa")]
    with_config = [cls for cls in models if getattr(cls, "config_class", None) is config]
    if all(cls._supports_sdpa for cls in with_config or models):
        return False
    classes = [cls for file in files for cls in file]
    attention = [cls for cls in classes if uses_interface(cls)]
    plain = attention and all(map(_is_plain_about_causality, attention)) and not any(map(sets_its_mask, attention))
    return not plain or any(map(own_attention, classes))


def _is_plain_about_causality(cls: type) -> bool:
    return constructor_says(cls, "is_causal")


def _modeling_files(config: type) -> list[list[type]]:
    """Return the nn.Modules of each imported modeling file of the config, or of a base: in its package, or naming the config."""
    for base in config.__mro__:
        if base.__module__ == "transformers.configuration_utils":
            return []  # the base of all configs; the base of all models lies in the same package
        files = [found for found in map(_classes_in, _files_in_package(base)) if any(hasattr(cls, "_supports_sdpa") for cls in found)]
        files = files or [_classes_in(name) for name in _files_with_model_of(base)]
        if files:
            return files
    return []


def _files_in_package(config: type) -> list[str]:
    """Return the names of the imported files in the config's package."""
    package = config.__module__.rpartition(".")[0] + "."
    return [name for name in list(sys.modules) if name.startswith(package) and "." not in name[len(package) :]]


def _files_with_model_of(config: type) -> list[str]:
    """Return the names of the files with a model that names the config as its own; a script outside any package may hold both."""
    models = [PreTrainedModel]
    for model in models:
        models += model.__subclasses__()
    return list({model.__module__: None for model in models if getattr(model, "config_class", None) is config})


def _classes_in(name: str) -> list[type]:
    values = list(vars(sys.modules[name]).values()) if name in sys.modules else []
    return [cls for cls in values if isinstance(cls, type) and cls.__module__ == name and issubclass(cls, nn.Module)]
