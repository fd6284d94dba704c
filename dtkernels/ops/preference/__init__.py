"""Losses on log-probabilities of tokens: preference optimization and policy gradients."""
