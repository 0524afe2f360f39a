"""Between chat messages and token ids: tokenizer, renderer, parsers. No arrays and no JAX in here."""
