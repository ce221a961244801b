"""Coroutines as tests."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

__all__ = ["asynchronous"]

P = ParamSpec("P")


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs a coroutine as a test, in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
