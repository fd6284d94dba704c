"""Draw random sizes, measure ours beside its peers at them, and summarize."""
