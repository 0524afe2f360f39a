"""Deterministic random checkpoints and tokenizers in the released format, for tests, benchmarks and notebooks."""
