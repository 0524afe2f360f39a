"""Training: the shared loop with exact resume, and what is trained with it."""
