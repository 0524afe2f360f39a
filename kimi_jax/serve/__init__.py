"""The OpenAI-compatible HTTP server: requests to engine requests, events to answers."""
