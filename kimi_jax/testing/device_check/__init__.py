"""The kernels held against their references on the device at hand, and timed: ``scripts/device_check``."""
