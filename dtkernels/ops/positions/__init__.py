"""Rotary position embeddings beside ``rope`` in ``dtkernels/ops``."""
