"""Messages one after the other in a file, each with its length before it."""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from veilfed.errors import Code, VeilfedError

__all__ = ["joined", "read_frames"]

_LENGTH = struct.Struct("<I")

Kind = TypeVar("Kind", bound=Message)


def joined(messages: Iterable[Message]) -> bytes:
    """The bytes of some messages."""
    parts: list[bytes] = []
    for message in messages:
        data = message.SerializeToString()
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def read_frames(path: Path, kind: type[Kind]) -> Iterator[Kind]:
    """The messages of a file, one at a time. Raises VeilfedError: FILE_UNUSABLE, STATE_CORRUPT."""
    try:
        with path.open("rb") as file:
            while head := file.read(_LENGTH.size):
                (length,) = _LENGTH.unpack(head)
                data = file.read(length)
                if len(data) != length:
                    raise VeilfedError(Code.STATE_CORRUPT, f"{path}: cut")
                yield kind.FromString(data)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    except (struct.error, DecodeError):
        raise VeilfedError(Code.STATE_CORRUPT, f"{path}: not the messages that were written") from None
