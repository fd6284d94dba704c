"""Norms, activations and look-ups beside the tuned ones in ``dtkernels/ops``."""
