"""Checkpoints: safetensors folders read and written, and what becomes of their tensors."""
