"""Search, measure and record schedules for tools/tune.py."""
