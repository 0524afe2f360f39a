"""The ROCm compiler on a machine without ROCm: its plugin from a wheel, and stand-ins for the libraries it links."""
