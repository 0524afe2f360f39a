"""Is this machine ready: facts gathered once, then pure checks over them."""
