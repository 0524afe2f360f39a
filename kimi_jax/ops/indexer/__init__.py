"""Learned selection of cached tokens for sparse latent attention (K3.1 Pro)."""
