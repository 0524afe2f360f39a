"""Programs that are measured beside ours; see bench.py."""
