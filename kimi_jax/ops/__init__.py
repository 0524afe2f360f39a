"""Operators: one folder each, with what it computes (api.py) and how (reference.py, later pallas.py)."""
