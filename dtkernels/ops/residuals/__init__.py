"""Replacements for residual sums and attention probabilities in newer models."""
