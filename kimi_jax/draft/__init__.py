"""Speculative decoding: draft models that propose tokens for the target to verify."""
