"""Run each LoRA layer of PEFT as one op: y + scale * (x A') B', forward and backward; part of `dtkernels.apply_to`.

Several adapters, merging, disable_adapter and dropout work as before. Quantised, sharded and other kinds of layers keep
their own path; the report says what is skipped, and why.
"""

from .lora import lora_forward, patch_lora

__all__ = ["lora_forward", "patch_lora"]
