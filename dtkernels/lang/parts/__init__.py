"""Parts of definitions that have names in schedules."""
