"""Choosing the next token from a vocabulary that may be split over devices."""
