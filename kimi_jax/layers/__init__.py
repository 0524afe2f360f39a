"""Flax NNX modules whose parameters carry named axes; they are written in local view (one device's shard)."""
