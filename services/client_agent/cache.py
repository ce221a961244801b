"""Embeddings on disk, so that the foundation model sees each sample once.

    FOLDER/VERSION-MODALITY.cache
    FOLDER/VERSION-MODALITY-PROMPTS.cache

One file for each version of the oracle's model (which covers weights and preprocessing), modality and, by their digest,
prompt tokens, with records of equal size that are only ever appended. Prompts change with each training, so of the
files with prompts those that were used last are kept.

    header  8 bytes magic, 4 bytes d, 4 bytes CRC-32 of both
    record  32 bytes SHA-256 of the input, d float32, 4 bytes CRC-32 of both; everything little-endian

A record that a crash cut off is removed before the next one is appended; one whose checksum does not fit counts as
absent, so its input is asked for again and appended anew. Inputs are not stored, but embeddings tell much of them:
the file is private (mode 0600).
"""

import fcntl
import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger

__all__ = ["EmbeddingCache", "key_of", "prompts_digest"]

log = get_logger("agent.cache")

MAGIC = b"vfcache1"
HEADER_BYTES = 16
KEY_BYTES = 32
# Files with prompts that are kept of one model: of a few jobs, their clients' own and mean prompts.
MAX_PROMPTED = 8

Float = NDArray[np.float32]
Inputs = Sequence[str] | Sequence[bytes]


def key_of(value: str | bytes) -> bytes:
    """SHA-256 of an input's content; of a text in UTF-8."""
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).digest()


def prompts_digest(prompts: Float) -> str:
    """SHA-256 of prompt tokens float32 [M, D], shape and elements, lower-case hexadecimal."""
    shape = np.array(prompts.shape, "<u4").tobytes()
    return hashlib.sha256(shape + np.ascontiguousarray(prompts, "<f4").tobytes()).hexdigest()


def _header(dimension: int) -> bytes:
    body = MAGIC + dimension.to_bytes(4, "little")
    return body + zlib.crc32(body).to_bytes(4, "little")


class EmbeddingCache:
    """The embeddings [d] of one model version. Several processes may use one file; a process needs one object of it."""

    def __init__(
        self,
        folder: Path,
        version: str,
        modality: Literal["text", "image"],
        dimension: int,
        prompts: Float | None = None,
    ) -> None:
        """Opens the file, or makes it. A file that is no cache of this dimension is started anew.

        `prompts` [M, D] are those that the embeddings are made with. `version` comes from the oracle and becomes a
        file name: it must be lower-case hexadecimal. Raises VeilfedError: PROTOCOL_VIOLATION for another version or
        dimension < 1, FILE_UNUSABLE.
        """
        if not re.fullmatch(r"[0-9a-f]{1,128}", version) or not 1 <= dimension < 1 << 32:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "the oracle's model card has no usable version or dimension")
        digest = "" if prompts is None else f"-{prompts_digest(prompts)}"
        self.path = folder / f"{version}-{modality}{digest}.cache"
        self.dimension = dimension
        self._record = np.dtype([("key", f"V{KEY_BYTES}"), ("vector", "<f4", (dimension,)), ("checksum", "<u4")])
        self._positions: dict[bytes, int] = {}  # key -> number of its last record
        self._known = 0  # records that have been indexed
        with self._translated():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._translated():
                if prompts is not None:
                    os.utime(self._file)
                    _drop_oldest(folder, f"{version}-{modality}-")
                self._start()
                self._index()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Inputs that have a record; a damaged one is found when it is looked up."""
        return len(self._positions)

    def get(self, inputs: Inputs) -> tuple[Float, NDArray[np.intp]]:
        """Embeddings float32 [n, d] of the inputs, and the indices of those that are absent (their rows are 0).

        Raises VeilfedError(FILE_UNUSABLE).
        """
        found = np.zeros((len(inputs), self.dimension), dtype=np.float32)
        absent = []
        values: Iterable[str | bytes] = inputs
        with self._translated():
            self._index()
            for row, value in enumerate(values):
                vector = self._read(key_of(value))
                if vector is None:
                    absent.append(row)
                else:
                    found[row] = vector
        return found, np.array(absent, dtype=np.intp)

    def add(self, inputs: Inputs, embeddings: Float) -> None:
        """Appends the embeddings float32 [n, d] of n inputs in one write, and syncs them to disk.

        Raises VeilfedError: INPUT_INVALID for another shape or values that are not finite, FILE_UNUSABLE.
        """
        if embeddings.shape != (len(inputs), self.dimension) or not np.isfinite(embeddings).all():
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"embeddings {list(embeddings.shape)} for {len(inputs)} inputs: finite [n, {self.dimension}] is needed",
            )
        records = np.zeros(len(inputs), dtype=self._record)
        records["key"] = [np.void(key_of(value)) for value in inputs]
        records["vector"] = embeddings
        records["checksum"] = [zlib.crc32(record.tobytes()[:-4]) for record in records]
        with self._translated():
            with self._locked():
                end = HEADER_BYTES + self._records() * self._record.itemsize
                os.ftruncate(self._file, end)  # what a crash cut off, or nothing
                _write(self._file, records.tobytes(), end)
                os.fdatasync(self._file)
            self._index()

    def _start(self) -> None:
        """Writes the header, unless it is there."""
        with self._locked():
            header = _header(self.dimension)
            found = os.pread(self._file, HEADER_BYTES, 0)
            if found != header:
                if found:
                    log.warning("the embedding cache is damaged and is started anew", file=str(self.path))
                os.ftruncate(self._file, 0)
                _write(self._file, header, 0)
                os.fdatasync(self._file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other processes from writing."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{self.path}: {error.strerror}") from None

    def _records(self) -> int:
        """Whole records in the file."""
        return max(0, os.fstat(self._file).st_size - HEADER_BYTES) // self._record.itemsize

    def _index(self) -> None:
        """Learns the keys of records that were appended since the last time, by this process or another."""
        count = self._records()
        if count == self._known:
            return
        if count < self._known:  # started anew by another process
            self._positions.clear()
            self._known = 0
        if not count:
            return
        # Not by its name: it may have been dropped for newer ones meanwhile, and is then used to the end.
        with open(self._file, "rb", closefd=False) as file:
            records = np.memmap(file, self._record, "r", HEADER_BYTES, (count,))
        keys = np.ascontiguousarray(records["key"][self._known :]).tobytes()
        for number in range(count - self._known):
            self._positions[keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]] = self._known + number
        self._known = count

    def _read(self, key: bytes) -> Float | None:
        """The vector of a key; None if there is none or its record is damaged."""
        number = self._positions.get(key)
        if number is None:
            return None
        size = self._record.itemsize
        data = os.pread(self._file, size, HEADER_BYTES + number * size)
        if len(data) != size or data[:KEY_BYTES] != key or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            del self._positions[key]
            log.warning("an embedding is damaged and is asked for again", file=str(self.path), record=number)
            return None
        return np.frombuffer(data, dtype="<f4", count=self.dimension, offset=KEY_BYTES)


def _write(file: int, data: bytes, position: int) -> None:
    """All of `data` at a position."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written


def _drop_oldest(folder: Path, prefix: str) -> None:
    """Removes the files with prompts that were used longest ago. Who has one open goes on with it."""
    found = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(folder) if entry.name.startswith(prefix)]
    for _, path in sorted(found)[:-MAX_PROMPTED]:
        Path(path).unlink(missing_ok=True)
