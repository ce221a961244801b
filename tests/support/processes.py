"""The real services as processes of their own, their ports, and polling."""

import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from veilfed.demo.processes import Process
from veilfed.demo.processes import command as veilfed

__all__ = ["Process", "free_port", "started", "until", "veilfed"]


def free_port() -> int:
    """A port that a service may be started at, and again after a kill.

    Not of those that the system gives out by itself (from 32768 on, or 49152): it could give it to somebody else while
    the service is down.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


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
