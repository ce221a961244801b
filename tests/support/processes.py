"""Starts the real services as processes of their own, and ends them by id."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Process", "started", "until", "veilfed"]


def veilfed(*arguments: str | Path) -> list[str]:
    """The command line of a `veilfed` subcommand in this interpreter."""
    return [sys.executable, "-m", "veilfed.cli.main", *(str(argument) for argument in arguments)]


def until(condition: Callable[[], bool], timeout: float, what: str, interval: float = 0.02) -> None:
    """Polls until `condition` holds; fails with `what` after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(interval)


class Process:
    """A running service. Its standard output and error go to `log` (.out and .err)."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.out = log.with_suffix(".out")
        self.err = log.with_suffix(".err")
        with self.out.open("wb") as out, self.err.open("ab") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def ready(self, timeout: float = 60.0) -> dict[str, Any]:
        """The service's ready line: the first line of its standard output, as JSON."""

        def line() -> str:
            text = self.out.read_text()
            return text.split("\n", 1)[0] if "\n" in text else ""

        def arrived() -> bool:
            if not line() and not self.running():
                raise AssertionError(f"ended with {self._process.returncode} before it was ready:\n{self.tail()}")
            return bool(line())

        until(arrived, timeout, f"ready line of process {self.pid}\n{self.tail()}")
        document: dict[str, Any] = json.loads(line())
        return document

    def tail(self, characters: int = 3000) -> str:
        return self.err.read_text(errors="replace")[-characters:]

    def signal(self, number: signal.Signals) -> None:
        if self.running():
            self._process.send_signal(number)

    def kill9(self) -> None:
        """Ends the process at once, as a crash of the machine would."""
        self.signal(signal.SIGKILL)
        self._process.wait(30)

    def terminate(self, timeout: float = 30.0) -> int:
        """Asks the process to end and returns its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float) -> int:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {self.pid} did not end within {timeout} s:\n{self.tail()}") from None


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: dict[str, str] | None = None, timeout: float = 60.0
) -> Iterator[Process]:
    """A service that is ready; killed when the block ends."""
    process = Process(command, log, environment)
    try:
        process.ready(timeout)
        yield process
    finally:
        process.kill9()
