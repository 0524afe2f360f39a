"""Attention Residuals mixing."""
