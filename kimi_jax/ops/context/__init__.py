"""Decode context parallelism: cached rows of a sequence dealt to several devices by position (K3.1 Pro notes, section 8)."""
