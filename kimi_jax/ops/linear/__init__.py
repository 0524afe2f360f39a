"""Projections: products of a few rows with weights stored ``[out, in]``."""
