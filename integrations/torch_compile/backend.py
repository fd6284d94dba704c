"""Hand a traced graph to Inductor, or another compiler, with what ops compute better replaced.

The rewriting stands in front of AOTAutograd, on the graph that Dynamo traced, and not among Inductor's joint or post-grad passes. There attention
has already been lowered to one backend's forward with its saved tensors and that backend's backward, a loss or a norm to both halves with
whatever the partitioner saves between them: each pattern would have to match two graphs at once, in inference and in training, under every
version's decompositions. Here a pattern is a forward, its op brings its own gradient, checkpointing and autocast are still to come, and shapes
are those of the program. What the graph is not here, normalized and functional, ``canonical`` and ``safety`` see to: one name for each spelling,
and no match across a write, a change of grad mode or of autocast.

torch's caches: the rewriting runs before AOTAutograd looks its cache up, so that the key is of the rewritten graph, which holds calls of
``torch.ops.dtkernels`` alone; counts are right after a cache hit too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from dtkernels import schedule_tables
from dtkernels.runtime import path_counters

from .replace import replace, replace_in_graph
from .table import wanted


class CompileBackend:
    """A backend of torch.compile: ``torch.compile(model, backend=dtkernels.compile_backend)``."""

    def __init__(self, ops: str | Iterable[str] = "auto", backend: str | Callable = "inductor"):
        self.wanted, self.backend = wanted(ops), backend
        self.__name__ = "dtkernels"

    def using(self, ops: str | Iterable[str] = "auto", backend: str | Callable = "inductor") -> CompileBackend:
        """Return a backend that replaces ``ops`` and hands the graph to ``backend``.

        ops: "auto", what was measured to gain; "all"; or names: attention, linear_cross_entropy, rmsnorm, layernorm, swiglu, geglu, lora.
        Several are a list. Raises ValueError for another word.
        """
        return CompileBackend(ops, backend)

    def __call__(self, module: fx.GraphModule, inputs: list, *, mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
        """Rewrite a traced module and compile it. ``mode`` and ``options`` are Inductor's."""
        replace(module, self.wanted)
        if self.backend == "inductor":
            from torch._inductor import list_mode_options
            from torch._inductor.compile_fx import compile_fx

            patches = {**(list_mode_options(mode) if mode else {}), **{k.replace("-", "_"): v for k, v in (options or {}).items()}}
            return compile_fx(module, inputs, config_patches=patches)
        from torch._dynamo.backends.registry import lookup_backend

        given = {k: v for k, v in (("mode", mode), ("options", options)) if v}
        return lookup_backend(self.backend)(module, inputs, **given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompileBackend) and (self.wanted, self.backend) == (other.wanted, other.backend)

    def __hash__(self) -> int:
        return hash((self.wanted, self.backend))

    def __repr__(self) -> str:
        return "<dtkernels compile backend>"


class ReplacementPass(CustomGraphPass):
    """The rewriting as a pass that Inductor runs on the graph that Dynamo traced."""

    def __init__(self, ops: str | Iterable[str] = "auto"):
        self.wanted = wanted(ops)

    def __call__(self, graph: fx.Graph) -> None:
        if isinstance(module := graph.owning_module, fx.GraphModule):
            replace(module, self.wanted)  # recompiles it
        else:
            replace_in_graph(graph, self.wanted)

    def uuid(self) -> bytes:
        """Return a key of everything that the result depends on besides the graph: the package, the ops asked for, and where kernels run."""
        state = repr((sorted(self.wanted.named), self.wanted.auto, path_counters.fallback(), path_counters.interpreting()))
        return hashlib.sha256(package_digest() + state.encode()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplacementPass) and self.wanted == other.wanted

    def __hash__(self) -> int:
        return hash(self.wanted)


@cache
def package_digest() -> bytes:
    """Return a hash of the package's sources, specs and schedule tables."""
    found = hashlib.sha256()
    for root in (Path(path_counters.__file__).parents[1], Path(__file__).parents[1], Path(schedule_tables.__file__).parent):  # apart in a checkout
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".yaml", ".json") and p.is_file()):
            found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.digest()


def inductor_options(ops: str | Iterable[str] = "auto", **options: Any) -> dict[str, Any]:
    """Return options for torch.compile that replace in its graphs what ops compute better: ``torch.compile(model, options=dtkernels.inductor_options())``.

    ops: as ``compile_backend.using`` takes them. options: further options of Inductor; a mode is one, by ``torch._inductor.list_mode_options``.
    Raises ValueError for an unknown op.
    """
    from torch._inductor import config

    early = {"pre_grad_pass_timing": "early"} if "pre_grad_pass_timing" in config.get_config_copy() else {}  # before the caches are looked up
    return {"pre_grad_custom_pass": ReplacementPass(ops), **early, **options}


compile_backend = CompileBackend()
