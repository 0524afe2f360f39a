"""Routing and the routed experts."""
