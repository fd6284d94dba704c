"""Write dtkernels as a package for the Hugging Face Kernel Hub: python tools/hub.py --output DIR.

The folder has what kernel-builder's noarch packages have: ``build.toml``, ``flake.nix``, ``CARD.md``, ``tests/``, ``torch-ext/dtkernels/``, and
``build/torch-<backend>/``, which ``kernels`` loads from a local path. The runtime is vendored: relative imports, the standard library and torch
alone, Triton where a kernel is compiled. Specs and tables are JSON. Tables and stored kernels of one architecture are inside.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from datetime import date
from pathlib import Path

import yaml

sys.path[:0] = [p for p in (str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)) if p not in sys.path]

from common.cli_types import Parser  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("lang", "algebra", "codegen", "autoschedule", "runtime", "ops", "specs")
BACKENDS = ("cuda", "cpu")
VERSION = 1

#: reads JSON under the names that the runtime calls
JSON_READER = '''"""Read JSON where the package outside the Hub reads YAML."""

import json

YAMLError = ValueError
SafeLoader = None


def load(text, Loader=None):
    """Parse JSON."""
    return json.loads(text)


safe_load = load
'''
#: replaces lang/yaml_text.py
SPEC_READER = '''"""Read specs, which are JSON here, into plain lists and mappings."""

import json
from pathlib import Path

from .errors import DTError


def read_text(path, what):
    """Read a text file; ``what`` describes it in errors."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DTError(f"{path}: {what} is UTF-8 text") from None


class Located:
    """Map texts inside a file to their positions: its first line."""

    def places(self, *path):
        return lambda offset: (1, 1)


def read_yaml(text, source):
    """Read the data in ``text``."""
    return read_located(text, source)[0]


def read_located(text, source):
    """Read the data in ``text``, with the positions of its texts."""
    try:
        return json.loads(text), Located()
    except ValueError as error:
        raise DTError(f"{source}: not JSON", found=str(error)) from None
'''
INIT = '''"""Fused kernels for PyTorch, compiled from a few lines of mathematics: forward and backward, for any shape."""

from . import layers
from .layers import apply_rotary_pos_emb, attention, cross_entropy, softmax

__all__ = ["layers", "apply_rotary_pos_emb", "attention", "cross_entropy", "softmax"]
'''
LAYERS = '''"""Layers without state, for ``kernels.kernelize``, and the same as functions."""

import torch
from torch import nn

from .vendored import ops


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return ops.rmsnorm(hidden_states, self.weight, self.variance_epsilon)


class SwiGLUMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    has_backward = True
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Softmax(nn.Module):
    """Softmax over dimension ``dim``, -1 where there is none."""

    has_backward = True
    can_torch_compile = True

    dim: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.softmax(input, -1 if self.dim is None else self.dim)


class Attention(nn.Module):
    """softmax(q k' scale + mask) v of (batch, heads, length, columns)."""

    has_backward = True
    can_torch_compile = True

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return ops.attention(query, key, value)


class CrossEntropyLoss(nn.Module):
    """The mean of log(sum(exp(x))) - x[target]."""

    has_backward = True
    can_torch_compile = True

    ignore_index: int
    reduction: str
    label_smoothing: float

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ops.cross_entropy(input, target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing, reduction=self.reduction)


class RotaryEmbedding(nn.Module):
    """Rotate queries and keys of (batch, heads, length, columns) by cos and sin."""

    has_backward = True
    can_torch_compile = True

    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def apply_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1):
    """Rotate queries and keys; cos and sin of (batch, length, columns)."""
    return ops.rope(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


attention, cross_entropy, softmax = ops.attention, ops.cross_entropy, ops.softmax
'''
TEST = '''import dtkernels
import torch


def test_softmax():
    x = torch.randn(7, 300, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.testing.assert_close(dtkernels.softmax(x), torch.softmax(x, -1))
'''
BUILD_TOML = """[general]
name = "dtkernels"
version = {version}
edition = 5
license = "Apache-2.0"
backends = [{backends}]

[general.hub]
repo-id = "{repo}"

[torch-noarch]
"""
FLAKE = """{
  description = "dtkernels";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs {
    inherit self;
    path = ./.;
  };
}
"""
CARD = """---
library_name: kernels
license: apache-2.0
---

# dtkernels

Fused kernels compiled from a few lines of mathematics, forward and backward: RMSNorm, gated MLP, rotary embedding, attention, softmax, cross
entropy. {stored} with Triton at first use. On a CPU the layers compute by a torch
reference, which is slow.

```python
from kernels import get_kernel

dtkernels = get_kernel("{repo}", version={version})
```
"""


def main(given: list[str] | None = None) -> int:
    parser = Parser("hub", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write; it must be empty or absent")
    parser.add_argument("--repo", default="dtkernels/dtkernels", help="owner/name on the Hub")
    parser.add_argument("--arch", default="sm_90", help="architecture whose tables and kernels are inside; none for no tables")
    parser.add_argument("--tables", type=Path, default=ROOT / "schedule_tables")
    options = parser.parse_args(given)
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        parser.error(f"argument --output: {options.output} is {'not empty' if options.output.is_dir() else 'a file'}; allowed: an empty folder, or a new one")
    known = sorted({arch for p in options.tables.glob("*") if p.is_dir() and (arch := arch_of(p)) is not None})
    if options.arch != "none" and options.arch not in known:
        parser.error(f"argument --arch: {options.tables} has no kernels of {options.arch!r}; allowed: {', '.join([*known, 'none'])}")
    write(options.output, options.repo, options.arch, options.tables)
    print(f"{options.output}: {sum(p.stat().st_size for p in options.output.rglob('*') if p.is_file()) / 2**20:.1f} MiB")
    return 0


def write(output: Path, repo: str, arch: str, tables: Path) -> None:
    """Write the package."""
    source = output / "torch-ext" / "dtkernels"
    vendor(source / "vendored")
    if arch != "none":
        copy_tables(tables, source / "vendored" / "schedule_tables", arch)
    (source / "__init__.py").write_text(INIT)
    (source / "layers.py").write_text(LAYERS)
    digest = checksum(source)
    isolate(source / "vendored", f"dtkernels_{digest}")
    (output / "tests").mkdir()
    (output / "tests" / "test_dtkernels.py").write_text(TEST)
    names = ", ".join(f'"{b}"' for b in BACKENDS)
    (output / "build.toml").write_text(BUILD_TOML.format(version=VERSION, repo=repo, backends=names))
    (output / "flake.nix").write_text(FLAKE)
    (output / "CARD.md").write_text(CARD.format(version=VERSION, repo=repo, stored=f"Measured tables and stored kernels for {arch}; other GPUs compile" if arch != "none" else "Kernels compile"))
    shutil.copy(ROOT / "LICENSE", output / "LICENSE")
    for backend in BACKENDS:
        build = output / "build" / f"torch-{backend}"
        shutil.copytree(source, build, ignore=None if backend == "cuda" else shutil.ignore_patterns("schedule_tables"))
        (build / "_ops.py").write_text(f'import torch\n\nops = torch.ops.dtkernels_{digest}\n\n\ndef add_op_namespace_prefix(op_name):\n    return f"dtkernels_{digest}::{{op_name}}"\n')
        metadata = {"id": f"_dtkernels_{backend}_{digest}", "name": "dtkernels", "version": VERSION, "license": "Apache-2.0",
                    "python-depends": [], "backend": {"type": backend}}  # fmt: skip
        (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def vendor(target: Path) -> None:
    """Copy the runtime, with its specs as JSON."""
    for room in ROOMS:
        shutil.copytree(ROOT / "dtkernels" / room, target / room, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "__init__.py").write_text('"""The runtime of dtkernels."""\n')
    (target / "json_text.py").write_text(JSON_READER)
    (target / "lang" / "yaml_text.py").write_text(SPEC_READER)
    for path in target.rglob("*.py"):
        depth = "." * (len(path.relative_to(target).parts))
        text = re.sub(r"^( *)import yaml$", rf"\1from {depth} import json_text as yaml", path.read_text(), flags=re.M)
        path.write_text(text)
    for spec in (target / "specs").glob("*.yaml"):
        as_json(spec)
        manifest = spec.with_suffix(".json")
        if manifest.exists():  # it names the checksum of the spec's file
            new = hashlib.sha256(spec.read_bytes()).hexdigest()
            manifest.write_text(re.sub(r'"file": "[0-9a-f]+"', f'"file": "{new}"', manifest.read_text(), count=1))


def as_json(path: Path) -> None:
    """Write the data of a YAML file as JSON, under its name."""
    path.write_text(json.dumps(yaml.safe_load(path.read_text()), default=lambda v: v.isoformat() if isinstance(v, date) else str(v)))


def arch_of(folder: Path) -> str | None:
    """Return the architecture of a folder with the tables of a GPU, or with kernels stored by architecture; None for another folder."""
    gpu = folder / "gpu.yaml"
    if folder.name.startswith("sm_") or not gpu.exists():
        return folder.name if folder.name.startswith("sm_") else None
    return f"sm_{yaml.safe_load(gpu.read_text()).get('arch')}"


def copy_tables(tables: Path, target: Path, arch: str) -> None:
    """Copy the tables and stored kernels of the GPUs of one architecture, and kernels stored by architecture."""
    for folder in sorted(p for p in tables.iterdir() if p.is_dir() and arch_of(p) == arch):
        shutil.copytree(folder, target / folder.name, ignore=shutil.ignore_patterns("measurements.safetensors", "__pycache__"))
        for path in (target / folder.name).glob("*.yaml"):
            as_json(path)


def isolate(vendored: Path, namespace: str) -> None:
    """Give the copy a torch.library namespace of its own, so that an installed dtkernels can be loaded beside it."""
    for path in vendored.rglob("*.py"):
        text = path.read_text()
        changed = text.replace('NAMESPACE = "dtkernels"', f'NAMESPACE = "{namespace}"').replace("torch.ops.dtkernels", f"torch.ops.{namespace}")
        if changed != text:
            path.write_text(changed)


def checksum(folder: Path) -> str:
    """Return a short checksum of all files in a folder."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        total.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:10]


if __name__ == "__main__":
    raise SystemExit(main())
