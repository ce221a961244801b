"""The real services as processes of their own, and polling."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from veilfed.demo.processes import Process
from veilfed.demo.processes import command as veilfed

__all__ = ["Process", "started", "until", "veilfed"]


def until(condition: Callable[[], bool], timeout: float, what: str, interval: float = 0.02) -> None:
    """Polls until `condition` holds; fails with `what` after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(interval)


@contextmanager
def started(
    arguments: Sequence[str], log: Path, environment: dict[str, str] | None = None, timeout: float = 60.0
) -> Iterator[Process]:
    """A service that is ready; killed when the block ends."""
    process = Process(arguments, log, environment)
    try:
        process.ready(timeout)
        yield process
    finally:
        process.kill()
