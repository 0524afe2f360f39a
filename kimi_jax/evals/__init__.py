"""Measures of a served model: real clients, and what their answers are worth."""
