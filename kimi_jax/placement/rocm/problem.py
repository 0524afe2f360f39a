"""What every step on the way to a compile-only target may raise."""

from kimi_jax.problems import ProblemsError


class TargetError(ProblemsError):
    """A target that this machine cannot compile for, and why."""
