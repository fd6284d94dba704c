"""torch.compile of models that nobody patched: a graph pass that replaces what ops compute better."""

from .backend import compile_backend, inductor_options
from .report import replacements

__all__ = ["compile_backend", "inductor_options", "replacements"]
