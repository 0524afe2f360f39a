"""Number formats of stored weights."""
