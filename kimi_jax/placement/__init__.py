"""Declared placement: named axes, layouts, and everything that follows from the two. Knows meshes, never Kimi."""
