"""Gated latent attention over cached latent rows."""
