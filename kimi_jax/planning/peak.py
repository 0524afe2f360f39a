"""The most memory that this process has held."""

import resource
import sys


def peak_bytes() -> int:
    """Bytes, since the process began; the operating system counts them."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
