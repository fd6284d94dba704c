"""The package for the Kernel Hub: loaded offline, by itself and by ``kernels``, with none of what the Hub does not allow."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
KERNELS = importlib.util.find_spec("kernels") is not None


def run(code: str, cwd: Path | str = "/", **variables: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")} | {"HF_HUB_OFFLINE": "1"} | variables
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """The package with the rows of one op of the H200, without its stored kernels."""
    tables, output = tmp_path_factory.mktemp("tables"), tmp_path_factory.mktemp("hub") / "package"
    (tables / "nvidia_h200").mkdir()
    for name in ("gpu.yaml", "softmax.yaml"):
        (tables / "nvidia_h200" / name).write_text((ROOT / "schedule_tables" / "nvidia_h200" / name).read_text())
    done = subprocess.run([sys.executable, ROOT / "tools" / "hub.py", "--output", output, "--tables", tables], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def test_it_has_what_the_hub_asks_for(package):
    assert {p.name for p in package.iterdir()} == {"build.toml", "flake.nix", "CARD.md", "LICENSE", "tests", "torch-ext", "build"}
    for variant in ("torch-cuda", "torch-cpu"):
        build = package / "build" / variant
        assert json.loads((build / "metadata.json").read_text())["backend"]["type"] == variant.removeprefix("torch-")
        for path in build.rglob("*.py"):
            for line in path.read_text().splitlines():
                word = line.split()
                outside = word[1].split(".")[0] if len(word) > 1 and word[0] in ("import", "from") and not line.endswith('"') else ""
                banned = {"yaml", "dtkernels", "safetensors", "transformers", "numpy"} - ({"numpy"} if path.name == "interpreter.py" else set())
                assert outside not in banned, f"{path}: {line}"  # Triton's interpreter, for tests, needs numpy itself


def test_tables_are_json_with_the_same_rows(package):
    tables = package / "build" / "torch-cuda" / "vendored" / "schedule_tables" / "nvidia_h200"
    own = ROOT / "schedule_tables" / "nvidia_h200" / "softmax.yaml"
    assert json.loads((tables / "softmax.yaml").read_text()) == json.loads(json.dumps(yaml.safe_load(own.read_text()), default=str))
    assert not (package / "build" / "torch-cpu" / "vendored" / "schedule_tables").exists()


ALONE = """
import importlib.util, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("yaml", "dtkernels", "safetensors", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
spec = importlib.util.spec_from_file_location("hub_dtkernels", "{build}/__init__.py")
module = sys.modules["hub_dtkernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from hub_dtkernels.vendored.runtime.tables.table import read_rows
from hub_dtkernels.vendored import ops
from pathlib import Path
x = torch.randn(5, 7, requires_grad=True)
print(torch.allclose(module.softmax(x), torch.softmax(x, -1)))
layer = module.layers.RMSNorm()
layer.weight, layer.variance_epsilon = torch.ones(7), 1e-6
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
for run in (layer, compiled):
    print(torch.allclose(torch.autograd.grad(run(x).sum(), x)[0], torch.autograd.grad(torch.nn.functional.rms_norm(x, (7,), eps=1e-6).sum(), x)[0], atol=1e-5))
print(torch.allclose(module.cross_entropy(x, torch.arange(5)), torch.nn.functional.cross_entropy(x, torch.arange(5))))
q = torch.randn(1, 2, 5, 8)
print(torch.allclose(module.attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-5))
print(ops.softmax.operator().spec.algorithm.inputs == ("A",))
table = Path("{build}/vendored/schedule_tables/nvidia_h200/softmax.yaml")
print(not table.exists() or len(read_rows(table.read_text(), "softmax")) > 10)
"""


def test_it_runs_by_itself(package):
    assert run(ALONE.replace("{build}", str(package / "build" / "torch-cuda"))) == ["True"] * 7


MODEL = """
import torch
from pathlib import Path
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama
import dtkernels
package = Path("{package}")
module = get_local_kernel(package)
x = torch.randn(3, 5)
print(torch.allclose(module.softmax(x), dtkernels.ops.softmax(x)))  # beside an installed one
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2))
tokens = torch.arange(10)[None]
before = model(tokens).logits
wanted = torch.autograd.grad(before.sum(), list(model.parameters()))
for kind, name in ((llama.LlamaRMSNorm, "RMSNorm"), (llama.LlamaMLP, "MLP")):
    if not getattr(kind, "kernel_layer_name", None):  # transformers takes other versions of kernels
        replace_kernel_forward_from_hub(kind, name)
mapping = {{"RMSNorm": {{"cpu": LocalLayerRepository(package, layer_name="RMSNorm")}}, "MLP": {{"cpu": LocalLayerRepository(package, layer_name="SwiGLUMLP")}}}}
with use_kernel_mapping(mapping, inherit_mapping=False):
    model = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
print("RMSNorm.forward" in str(model.model.norm.forward) and "LlamaRMSNorm.forward" not in str(model.model.norm.forward))
after = model(tokens).logits
print(torch.allclose(before, after, atol=1e-5))
print(all(torch.allclose(a, b, atol=1e-4) for a, b in zip(wanted, torch.autograd.grad(after.sum(), list(model.parameters())))))
print(torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(tokens).logits, before, atol=1e-5))
"""


@pytest.mark.skipif(not KERNELS, reason="kernels is not installed: pip install kernels")
def test_kernels_loads_it_and_a_model_takes_its_layers(package):
    assert run(MODEL.format(package=package)) == ["True"] * 5


def documented() -> str:
    """The code of docs/hub.md, which is indented there: the page is read where kernels is not installed, too."""
    lines = (ROOT / "docs" / "hub.md").read_text().split("## In a model")[1].split("\n## ")[0].splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    ") or not line).strip() + "\n"


AFTER = """
import torch
from kernels import get_kernel
ids, made = torch.arange(9)[None], model.model.layers[0].mlp.forward.__func__.__module__
print(made)
plain = LlamaForCausalLM(model.config)
plain.load_state_dict(model.state_dict())
print(torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-5), "transformers" in plain.model.norm.forward.__func__.__module__)
print(torch.allclose(get_kernel("owner/dtkernels", version=1).softmax(torch.ones(2, 3)), torch.ones(2, 3) / 3))
"""


@pytest.mark.skipif(not KERNELS, reason="kernels is not installed: pip install kernels")
def test_what_the_page_says_replaces_the_layers(package):
    """Without the marks, `kernelize` had replaced nothing, without a word."""
    (package.parent / "hub_package").symlink_to(package)
    norm, mlp, *said = run(documented() + AFTER, package.parent, LOCAL_KERNELS=f"owner/dtkernels={package}")
    assert not norm.startswith("transformers") and norm == mlp and said == ["True"] * 3


def test_the_page_has_the_code_that_is_run():
    compile(documented(), "docs/hub.md", "exec")
    assert "replace_kernel_forward_from_hub(marked, name)" in documented() and "kernelize(model" in documented()
