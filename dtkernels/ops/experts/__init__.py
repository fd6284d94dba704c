"""Products by expert and mixtures of experts."""
