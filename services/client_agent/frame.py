"""The frame around what the agent keeps in files: a changed or missing byte is found."""

import hashlib

__all__ = ["framed", "unframed"]

_DIGEST_BYTES = 32


def framed(magic: bytes, body: bytes) -> bytes:
    """The magic, which names the kind and its version; the SHA-256 of the body; the body."""
    return magic + hashlib.sha256(body).digest() + body


def unframed(magic: bytes, data: bytes) -> bytes | None:
    """The body of framed bytes; None where they are of another kind, or not whole."""
    start = len(magic) + _DIGEST_BYTES
    body = data[start:]
    whole = data[: len(magic)] == magic and hashlib.sha256(body).digest() == data[len(magic) : start]
    return body if whole else None
