"""Norms, activations and look-ups that models have beside those of the folder above."""
