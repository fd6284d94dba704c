"""Losses on logits, and on the hidden states before the last layer."""
