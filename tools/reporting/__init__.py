"""The parts of tools/report.py: what was measured, its figures, the page."""
