"""Switch one model instance to "dtkernels" attention: find the configs that may name it, set them, verify them, restore them.

A model's attention modules read the implementation's name from their config in every call, so the config is the switch.
`set_attn_implementation` only warns if it fails; therefore the config of each module is read again afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from ..patching.call_stats import ATTRIBUTE, NAME, CallRecord, remember_before
from ..patching.report import ALREADY, PATCHED, SKIPPED, WOULD_PATCH, PatchReport
from ..patching.source_inspection import eager_function, gives_weights, implementations_compared, names_in, own_attention, uses_interface

_KEY = "_attn_implementation"


@dataclass
class _Site:
    """One attention module: its path, the config it reads, and the implementation named there before the switch."""

    name: str
    module: nn.Module
    config: object
    before: str | None


def patch_attention(model: nn.Module, report: PatchReport) -> None:
    """Switch every Hugging Face model inside `model` to dtkernels' attention; see `apply_to` for the arguments."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            report.add(name, "attention", SKIPPED, "nn.MultiheadAttention is one function of torch with its projections; call dtkernels.ops.attention there")
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return  # without transformers no module can be a transformers model
    walk = list(_walk(model, PreTrainedModel))
    try:
        from . import attention_function  # noqa: F401  the interface must know the name before a config says it
        from .foreign_implementations import foreign_attention
    except ImportError as error:  # a transformers older than the AttentionInterface
        for name, module, owner in walk:
            if module is owner:
                report.add(name, "attention", SKIPPED, f"this transformers lacks what is needed: {error}")
        return
    blocked = _blocked_configs(walk)
    foreign = _foreign_configs(walk, foreign_attention)
    if "attention" not in report.by_name:
        blocked = {key: f"{what}, may compute something else; patched only if attention is asked for by name" for key, what in foreign.items()} | blocked
    sites = [
        _Site(name, module, config, getattr(config, _KEY))
        for name, module, owner in walk
        if uses_interface(type(module)) and (config := _config(module, owner)) is not None
    ]
    _add_models_without_interface(walk, sites, report)
    if not report.dry_run and any(site.before != NAME and id(site.config) not in blocked for site in sites):
        _switch(walk, blocked, report)
    for site in sites:
        what = foreign.get(id(site.config))
        _add_site(site, blocked.get(id(site.config)), None if what is None else f"asked for by name in place of {what}; other calls take transformers' own", report)


def _walk(model: nn.Module, pretrained: type[nn.Module]) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Return every module once, as (name, module, the nearest enclosing transformers model or None)."""
    owners: dict[str, nn.Module | None] = {}
    for name, module in model.named_modules():
        parent = owners.get(name.rpartition(".")[0]) if name else None
        owners[name] = module if isinstance(module, pretrained) else parent
        yield name, module, owners[name]


def _config(module: nn.Module, owner: nn.Module | None) -> object | None:
    for holder in (module, owner):
        config = getattr(holder, "config", None)
        if hasattr(config, _KEY):
            return config
    return None


def _configs(walk: list) -> list:
    """Return every config that a switch of the model may change, sub-configs included, each once."""
    found, queue = {}, [config for _, module, owner in walk if (config := _config(module, owner)) is not None]
    while queue:
        config = queue.pop()
        if id(config) not in found:
            found[id(config)] = config
            children = (getattr(config, key, None) for key in getattr(config, "sub_configs", ()))
            queue += [child for child in children if hasattr(child, _KEY)]
    return list(found.values())


def _blocked_configs(walk: list) -> dict[int, str]:
    """Return id(config) -> why the modules that read it must keep their implementation."""
    blocked: dict[int, str] = {}
    for _, module, owner in walk:
        if owner is None or (config := _config(owner, None)) is None:
            continue
        if (reason := _reason(module, owner, config)) is not None:
            blocked.setdefault(id(config), reason)
        if uses_interface(type(module)) and not owner._supports_sdpa and gives_weights(type(owner)):
            reason = f"{type(owner).__name__} returns attention weights unasked: only eager attention computes them"
            blocked.setdefault(id(_config(module, owner)), reason)
    return blocked


def _foreign_configs(walk: list, foreign: Callable[[type, str | None], str | None]) -> dict[int, str]:
    """Return id(config) -> what somebody else registered for the modules that read it."""
    found: dict[int, str] = {}
    for cls, config in {(type(module), id(config)): (type(module), config) for module, config in _readers(walk)}.values():
        if (what := foreign(cls, getattr(config, _KEY))) is not None:
            found.setdefault(id(config), what)
    return found


def _readers(walk: list) -> Iterator[tuple[nn.Module, object]]:
    """Yield (module, config) for attention modules and transformers models."""
    for _, module, owner in walk:
        if (module is owner or uses_interface(type(module))) and (config := _config(module, owner)) is not None:
            yield module, config


def _reason(module: nn.Module, owner: nn.Module, config: object) -> str | None:
    cls = type(module)
    special = implementations_compared(cls)
    if "sdpa" in special:
        return f"{cls.__name__} treats 'sdpa' unlike other names"
    if not owner._supports_sdpa and "eager" in special:
        return f"{cls.__name__} treats 'eager' unlike other names"
    if getattr(config, "output_attentions", False):
        return "config.output_attentions is set: only eager attention returns the weights"
    return None


def _add_models_without_interface(walk: list, sites: list[_Site], report: PatchReport) -> None:
    """Add a row for each model with attention that does not use the AttentionInterface."""
    seen = {id(site.config) for site in sites}
    for name, module, owner in walk:
        if module is not owner or id(module.config) in seen:
            continue
        by = type(module) if not _can_switch(module) else _class_outside_interface(walk, module)
        if by is not None:  # a model inside this one, with the same config, may use it
            seen.add(id(module.config))
            report.add(name, "attention", SKIPPED, f"{by.__name__} does not use transformers' AttentionInterface")


def _class_outside_interface(walk: list, owner: nn.Module) -> type | None:
    """Return the class that computes attention by itself in a modeling file that otherwise uses the interface, or None."""
    parts = (type(module) for _, module, of in walk if of is owner and module is not owner)
    by_itself = (part for part in parts if own_attention(part) or "scaled_dot_product_attention" in names_in(part))
    return next((part for part in by_itself if not uses_interface(part)), None)


def _switch(walk: list, blocked: dict[int, str], report: PatchReport) -> None:
    """Switch every transformers model that allows it, outermost first. Undo a switch that reached a blocked config.

    A model passes the name on to the models inside it, but some versions of transformers do not reach all of them.
    """
    taken_back = []
    for config in _configs(walk):
        restore = partial(_restore_config, config, _attention_state(config))
        if id(config) in blocked:
            taken_back.append(restore)
        elif getattr(config, _KEY) != NAME:  # else an earlier report restores it
            report.on_undo(restore)
            remember_before(config, getattr(config, _KEY))
    for _, module, owner in walk:
        if module is owner and id(module.config) not in blocked and getattr(module.config, _KEY) != NAME and _can_switch(module):
            module.set_attn_implementation(NAME)
    for restore in taken_back:
        restore()


def _can_switch(module: nn.Module) -> bool:
    can_set = getattr(type(module), "_can_set_attn_implementation", None)
    return can_set is None or can_set()


def _attention_state(config: object) -> dict:
    return {key: value for key, value in vars(config).items() if key.startswith("_attn_")}


def _restore_config(config: object, before: dict) -> None:
    """Restore the implementation's name, unless somebody has set another one since."""
    if getattr(config, _KEY) != NAME:
        return
    for key in _attention_state(config).keys() - before.keys():
        del vars(config)[key]
    vars(config).update(before)


def _add_site(site: _Site, blocked: str | None, instead: str | None, report: PatchReport) -> None:
    """Report the outcome for one attention module, and give it a record to count its calls. ``instead``: what a patch takes the place of, if that is foreign."""
    state = ALREADY if site.before == NAME else WOULD_PATCH if report.dry_run else PATCHED
    now = getattr(site.config, _KEY)
    if state != ALREADY and blocked is not None:
        report.add(site.name, "attention", SKIPPED, blocked)
    elif state == PATCHED and now != NAME:
        report.add(site.name, "attention", SKIPPED, f"its config still says {now!r} after the switch")
    else:
        record = vars(site.module).get(ATTRIBUTE)
        if record is None and not report.dry_run:
            original = None if site.before == NAME else site.before
            record = CallRecord(original=original, eager=eager_function(type(site.module)), as_measured="attention" in report.as_measured)
            report.on_undo(partial(_forget, weakref.ref(site.module), record))
            setattr(site.module, ATTRIBUTE, record)
        report.add(site.name, "attention", state, instead or "", record)


def _forget(ref: weakref.ref, record: CallRecord) -> None:
    module = ref()
    if module is not None and vars(module).get(ATTRIBUTE) is record:
        delattr(module, ATTRIBUTE)
