"""LoRA layers of PEFT as one op: y + scale * (x A') B', forward and backward; part of `dtkernels.apply_to`.

Several adapters, merging, disable_adapter and dropout work as before. Quantised, sharded and other kinds of layers keep
their own path; what is skipped, and why, stands in the report.
"""

from .lora import lora_forward, patch_lora

__all__ = ["lora_forward", "patch_lora"]
