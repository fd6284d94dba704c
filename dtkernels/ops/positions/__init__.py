"""Rotary position embeddings beside that of the folder above."""
