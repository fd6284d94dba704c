"""Show what `apply_to` would patch in each model type of the installed transformers, and why it leaves the rest alone.

    python tools/coverage.py                          every type with a causal, masked, sequence-to-sequence or image-text-to-text LM
    python tools/coverage.py --types llama,t5         some types
    python tools/coverage.py --json coverage.json     the same as JSON, with every reason

A model is made without data (on the meta device) with two layers, and with the layers of its default config if that fails. A type that
cannot be made is said in the table. Numbers count modules; "2 of 4" are patched, and the reason is printed below.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [p for p in (str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)) if p not in sys.path]

from common.cli_types import Parser  # noqa: E402
from common.require_packages import needs  # noqa: E402

PARTS = {
    "attention": ("attention",),
    "norms": ("rmsnorm", "layernorm"),
    "gated MLP": ("swiglu", "geglu"),
    "relu^2": ("relu_squared",),
    "rope": ("rope",),
    "loss": ("cross_entropy",),
    "experts": ("experts",),
}
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
SECONDS = 120  #: for one type


def types() -> dict[str, str]:
    """Return model type -> the name of its class."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for kind, name in getattr(modeling_auto, mapping, {}).items():
            found.setdefault(kind, name if isinstance(name, str) else name[0])
    return dict(sorted(found.items()))


def cover(kind: str, name: str) -> dict:
    """Return what would be patched in a model type: part -> {"patched", "of", "why"}, or {"error"}."""
    try:
        with _at_most(SECONDS):
            model = _made(kind, name)
            import dtkernels

            report = dtkernels.apply_to(model, ops="all", dry_run=True)
            return {"class": name, **{part: _part(model, report, part) for part in PARTS}}
    except Exception as error:  # code of two hundred models: one that cannot be made must not end the table
        return {"class": name, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else 'no message'}"}


def _made(kind: str, name: str):
    """Return a model of the type without data. Some classes take the part of the config that describes the text."""
    import torch
    import transformers

    cls = getattr(transformers, name)
    first = None
    for layers, text in ((2, False), (2, True), (None, False)):
        config = transformers.AutoConfig.for_model(kind)
        try:
            config = config.get_text_config() if text else config
            if layers is not None:
                _shorten(config, layers)
            with torch.device("meta"):
                return cls(config)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _shorten(config, layers: int) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for attribute in LAYERS:
            if type(getattr(part, attribute, None)) is int:
                setattr(part, attribute, min(layers, getattr(part, attribute)))
        if type(getattr(part, "first_k_dense_replace", None)) is int:  # mixtures come after the first layers
            part.first_k_dense_replace = min(layers - 1, part.first_k_dense_replace)
        if getattr(part, "num_key_value_heads", 0) is None:
            part.num_key_value_heads = part.num_attention_heads
        lists = {attribute: held for attribute, held in vars(part).items() if "layer" in attribute and isinstance(held, list) and len(held) > layers}
        kinds = lists.get("layer_types", [])
        chosen = sorted(sorted(range(len(kinds)), key=lambda i: (kinds.index(kinds[i]) != i, i))[:layers]) or range(layers)  # of different kinds, if there are any
        for attribute, held in lists.items():
            setattr(part, attribute, [held[i] for i in chosen] if len(held) == len(kinds) else held[:layers])


def _part(model, report, part: str) -> dict:
    """Return how many modules of a part would be patched, of how many, and why not the others."""
    rows = [row for row in report.rows if row.op in PARTS[part]]
    patched = [row for row in rows if row.state == "would patch"]
    why = Counter(row.reason for row in rows if row.state == "skipped")
    if part in _SEEMS:
        known = {row.module for row in rows}
        why.update(_SEEMS[part](m) for n, m in model.named_modules() if n not in known)
        del why[""]
    if not rows and not why:
        return {"patched": 0, "of": 0, "why": {_NONE[part]: 1} if part in _NONE else {}}
    return {"patched": len(patched), "of": len(patched) + why.total(), "why": dict(why)}


def _seems_norm(module) -> str:
    """Return what is said of a module that is named like a norm and not found to be one; else nothing."""
    name = type(module).__name__
    return f"{name} computes something else" if name.endswith(("Norm", "NormGated")) else ""


def _seems_rope(module) -> str:
    """Return what is said of a module whose forward calls a function named like rotary embeddings; else nothing."""
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    called = [name for name in names if inspect.isfunction(forward.__globals__.get(name)) and ("rotary" in name or "rope" in name)]
    return f"{type(module).__name__} calls {called[0]}, which computes something else" if called else ""


_SEEMS = {"norms": _seems_norm, "rope": _seems_rope}
_NONE = {
    "attention": "no attention that transformers' interface reaches",
    "gated MLP": "no module computes down(act(gate(x)) * up(x)) between linear layers",
    "rope": "no module calls a rotary function",
    "loss": "its loss is no cross entropy of tokens by loss_function or CrossEntropyLoss",
}


@contextlib.contextmanager
def _at_most(seconds: int):
    def stop(*_):
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def table(found: dict[str, dict]) -> str:
    """Format the results: a row for each type, then each reason once with the types that it holds for."""
    rows = [("type", *PARTS)]
    reasons: dict[str, list[str]] = {}
    for kind, parts in found.items():
        if "error" in parts:
            rows.append((kind, "cannot be made", *[""] * (len(PARTS) - 1)))
            reasons.setdefault(f"cannot be made: {parts['error']}", []).append(kind)
            continue
        rows.append((kind, *[_cell(parts[part]) for part in PARTS]))
        for part in PARTS:
            for why in parts[part]["why"]:
                reasons.setdefault(f"{part}: {why}", []).append(kind)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", *[f"{why}  [{', '.join(kinds[:6])}{f' and {len(kinds) - 6} more' if len(kinds) > 6 else ''}]" for why, kinds in sorted(reasons.items())]]
    return "\n".join([*lines, "", _summary(found)])


def _cell(part: dict) -> str:
    return "-" if not part["of"] else str(part["patched"]) if part["patched"] == part["of"] else f"{part['patched']} of {part['of']}"


def _summary(found: dict[str, dict]) -> str:
    made = [parts for parts in found.values() if "error" not in parts]
    counts = [f"{part} {sum(bool(p[part]['of']) and p[part]['patched'] == p[part]['of'] for p in made)}" for part in PARTS]
    return f"{len(made)} of {len(found)} types made; all modules patched in: {', '.join(counts)}"


def main(argv: list[str] | None = None) -> None:
    parser = Parser("coverage", __doc__)
    parser.add_argument("--types", help="model types, separated by commas; default: all")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(argv)
    needs("coverage", "transformers")
    import transformers

    transformers.logging.set_verbosity_error()
    known = types()
    wanted = args.types.split(",") if args.types else list(known)
    if unknown := [kind for kind in wanted if kind not in known]:
        parser.error(f"no language model of type {', '.join(unknown)} in this transformers; there are {len(known)}, such as llama, bert, t5")
    found = {}
    for i, kind in enumerate(wanted, 1):
        if sys.stderr.isatty():
            print(f"\r{i}/{len(wanted)} {kind:40}", end="", file=sys.stderr, flush=True)
        found[kind] = cover(kind, known[kind])
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
