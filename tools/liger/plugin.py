"""Run Liger's own tests with our functions in the place of Liger's: a pytest plugin. `tools/compare_liger.py --tests` loads it."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from .adapters import NoCounterpart
from .substitution import substitute

SECONDS, LARGEST = (int(os.environ.get(f"LIGER_TESTS_{name}", default)) for name, default in (("SECONDS", "120"), ("LARGEST", str(1 << 22))))
calls: dict[str, int] = {}
outcomes: dict[str, dict] = {}


def pytest_configure(config):
    import torch

    substitute(calls)
    torch.set_num_threads(1)
    utils = sys.modules.get("test.utils") or __import__("test.utils", fromlist=["*"])
    if not torch.cuda.is_available():
        utils.supports_bfloat16 = lambda: True  # the reference computes it on a CPU too
        torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=0)  # a module asks for the memory of the device


    for name in ("llama.modeling_llama.LlamaRotaryEmbedding", "llama4.modeling_llama4.Llama4TextRotaryEmbedding", "qwen2_vl.modeling_qwen2_vl.Qwen2VLRotaryEmbedding"):
        _without_device(name)


def _without_device(name: str) -> None:
    """Let a rotary embedding of transformers be made with ``device=``, as Liger's tests do: newer ones take none. Left alone where it is not there."""
    module, _, kind = f"transformers.models.{name}".rpartition(".")
    try:
        found = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError):
        return
    made = found.__init__
    if "device" not in inspect.signature(made).parameters:
        found.__init__ = lambda self, *args, device=None, **kwargs: made(self, *args, **kwargs)


def pytest_collection_modifyitems(items):
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec and "world_size" in spec.params:
            item.add_marker(pytest.mark.skip(reason="needs several processes with a GPU each"))
        size = _size(spec)
        if size > LARGEST:
            item.add_marker(pytest.mark.skip(reason=f"sizes multiply to {size}, more than {LARGEST}"))


def _size(spec) -> int:
    """Return the product of the whole numbers among a test's parameters: a bound on the elements of its tensors."""
    total = 1
    for value in (spec.params if spec else {}).values():
        parts = value if isinstance(value, (tuple, list)) else [value]
        total *= math.prod(p for p in parts if isinstance(p, int) and not isinstance(p, bool) and p > 0)
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A call that we have no counterpart for is a skip with its reason; a test that takes too long is a failure."""
    alarm = threading.current_thread() is threading.main_thread()
    if alarm:
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(SECONDS)
    try:
        return (yield)
    except NoCounterpart as reason:
        pytest.skip(f"no counterpart: {reason}")
    finally:
        if alarm:
            signal.alarm(0)


def _late(*_):
    raise TimeoutError(f"more than {SECONDS} s")


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        if report.failed:
            reason = report.longreprtext.strip().splitlines()[-1] if report.longreprtext.strip() else "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = " ".join(str(crash.message).split())[:200] if crash else reason
        outcomes[report.nodeid] = {"outcome": "xfailed" if hasattr(report, "wasxfail") else report.outcome, "reason": reason.removeprefix("Skipped: ")}


def pytest_sessionfinish():
    path = os.environ.get("LIGER_TESTS_RESULTS")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"outcomes": outcomes, "calls": calls}, file)
