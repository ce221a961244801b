"""Runs a `veilfed` command and records every message of its gRPC channels, both ways, before TLS.

    python -m tests.support.recorded FILE agent serve --config ...

Every call has one client, so the recordings of all processes hold all messages of a run.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import veilfed.cli.main  # sets grpc's TLS versions before grpc is imported

import grpc.aio._channel as channels  # isort: skip

__all__ = ["Message", "read_recording", "recording_command"]

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass(frozen=True)
class Message:
    """`direction` is "out" for what the recording process sent."""

    recorder: str
    target: str
    method: str
    direction: str
    data: bytes


def recording_command(file: Path, arguments: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "tests.support.recorded", str(file), *(str(argument) for argument in arguments)]


def read_recording(file: Path) -> Iterator[Message]:
    """The messages of a recording, in their order."""
    with file.open("rb") as stream:
        while header := stream.readline():
            fields = json.loads(header)
            yield Message(recorder=file.stem, data=stream.read(fields.pop("length")), **fields)


class Recorder:
    """Appends messages to a file, a header line and the bytes each."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("ab", buffering=0)
        self._lock = threading.Lock()

    def write(self, target: str, method: str, direction: str, data: bytes) -> None:
        header = {"target": target, "method": method, "direction": direction, "length": len(data)}
        with self._lock:
            self._stream.write(json.dumps(header).encode() + b"\n" + data)

    def install(self) -> None:
        """Wraps what every channel of this process uses to turn messages into bytes and back."""
        begin = channels.Channel.__init__

        def remember_target(channel: Any, target: str, *arguments: Any, **named: Any) -> None:
            begin(channel, target, *arguments, **named)
            channel.recorded_target = target

        channels.Channel.__init__ = remember_target  # type: ignore[method-assign,assignment]
        for kind in KINDS:
            setattr(channels.Channel, kind, self._recorded(getattr(channels.Channel, kind)))

    def _recorded(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(
            channel: Any,
            method: str,
            request_serializer: Callable[[Any], bytes],
            response_deserializer: Callable[[bytes], Any],
            *arguments: Any,
            **named: Any,
        ) -> Any:
            def serialize(message: Any) -> bytes:
                data = request_serializer(message)
                self.write(channel.recorded_target, method, "out", data)
                return data

            def deserialize(data: bytes) -> Any:
                self.write(channel.recorded_target, method, "in", data)
                return response_deserializer(data)

            return make(channel, method, serialize, deserialize, *arguments, **named)

        return made


if __name__ == "__main__":
    Recorder(Path(sys.argv.pop(1))).install()
    veilfed.cli.main.main()
