"""Launches that many layers share are traced and lowered once."""

import inspect
from collections.abc import Callable
from typing import TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., object])


def once(function: Function) -> Function:
    """Makes equal calls of a kernel one function of the program: same shapes and dtypes, same keyword arguments.

    Otherwise every layer traces and lowers each of its kernels anew, which takes longer than all of the compiler's own work.

    Args:
      function: its keyword-only parameters are static and hashable; all others are arrays or trees of arrays.
    """
    parameters = inspect.signature(function).parameters.values()
    static = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return cast(Function, jax.jit(function, static_argnames=static))
