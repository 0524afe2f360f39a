"""Training and held-out data of kimi-nano, made from seeds: conversations, pictures, and the tokenizer for them."""
