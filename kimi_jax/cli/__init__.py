"""The `kimi-jax` command: one module per verb."""
