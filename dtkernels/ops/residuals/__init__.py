"""What newer models put in the place of residual sums and of plain attention probabilities."""
