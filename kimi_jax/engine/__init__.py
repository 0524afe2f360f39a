"""Runs requests on the compiled steps; knows token ids only, never text."""
