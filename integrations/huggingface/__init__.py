"""Run a model's attention, norms, activations and loss on dtkernels, without changing its code.

    report = dtkernels.apply_to(model)      # patches this instance, nothing else
    print(report)                           # module, op, patched or skipped and why, calls, fallbacks
    report.undo()                           # exactly as before

    with dtkernels.patched(model):          # the same, for a block of code
        ...

If transformers is installed, importing this package registers `attn_implementation="dtkernels"` and, where there is an interface for experts,
`experts_implementation="dtkernels"` with it: `AutoModel.from_pretrained(name, attn_implementation="dtkernels")`. Without transformers, plain
`nn.Module` models still work.
"""

from contextlib import suppress

from .apply import OPS, PatchError, apply_to, patched
from .layers.experts import register as register_experts
from .patching.call_stats import NAME, CallRecord, unpatched_calls
from .patching.report import PatchReport, Row

try:
    from .attention.attention_function import register
except ImportError:  # transformers is absent, or too old to have an attention interface: activations are still patched
    HAVE_TRANSFORMERS = False
else:
    HAVE_TRANSFORMERS = True
    register()
    from .attention.continuous_batching import continuous_batching
    with suppress(ImportError):  # before transformers 5.0 experts had no interface
        register_experts()

__all__ = [
    "HAVE_TRANSFORMERS",
    "NAME",
    "OPS",
    "CallRecord",
    "PatchError",
    "PatchReport",
    "Row",
    "apply_to",
    "continuous_batching",
    "patched",
    "unpatched_calls",
]
