"""The parts of tools/tune.py."""
