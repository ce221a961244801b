"""Starts services as processes of their own and ends them by id."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veilfed.errors import Code, VeilfedError

__all__ = ["Process", "command"]

POLL_SECONDS = 0.02
LOG_TAIL = 2000


def command(*arguments: str | Path) -> list[str]:
    """The command line of a `veilfed` subcommand in this interpreter."""
    return [sys.executable, "-m", "veilfed.cli.main", *(str(argument) for argument in arguments)]


class Process:
    """A service. Its standard output and error go to `log` with the suffixes .out and .err."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.out = log.with_suffix(".out")
        self.err = log.with_suffix(".err")
        # Several services share few cores: each has one thread for its arithmetic, unless its configuration says more.
        threads = {"OMP_NUM_THREADS": "1"}
        with self.out.open("wb") as out, self.err.open("ab") as err:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **threads, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def tail(self) -> str:
        """The end of its log."""
        return self.err.read_text(errors="replace")[-LOG_TAIL:]

    def ready(self, timeout: float = 60.0) -> dict[str, Any]:
        """Waits for the service's ready line, the first of its standard output, and returns it parsed.

        Raises VeilfedError(UNREACHABLE) when the process ends before, or is not ready in time.
        """
        end = time.monotonic() + timeout
        while "\n" not in (text := self.out.read_text()):
            if not self.running():
                why = f"ended with exit code {self._process.returncode} before it was ready"
                raise VeilfedError(Code.UNREACHABLE, f"{self.err.stem} {why}:\n{self.tail()}", f"Its log: {self.err}")
            if time.monotonic() > end:
                why = f"was not ready within {timeout:.0f} s"
                raise VeilfedError(Code.UNREACHABLE, f"{self.err.stem} {why}:\n{self.tail()}", f"Its log: {self.err}")
            time.sleep(POLL_SECONDS)
        document: dict[str, Any] = json.loads(text.split("\n", 1)[0])
        return document

    def signal(self, number: signal.Signals) -> None:
        if self.running():
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the process at once (SIGKILL), as a crash of the machine would."""
        self.signal(signal.SIGKILL)
        self._process.wait(30)

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises VeilfedError(TIMEOUT) when it has not ended in time."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise VeilfedError(Code.TIMEOUT, f"{self.err.stem} did not end within {timeout:.0f} s") from None

    def ask_to_stop(self) -> None:
        """SIGTERM: the service ends in its own time."""
        self.signal(signal.SIGTERM)

    def terminate(self, timeout: float = 30.0) -> int:
        """Asks the process to end and returns its exit code."""
        self.ask_to_stop()
        return self.wait(timeout)
