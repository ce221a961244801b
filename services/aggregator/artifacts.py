"""Files named by the SHA-256 of their bytes: published models, and updates until they are folded.

    models/<2 digits>/<sha256>                      given out by Fetch
    uploads/<job>/<institution>/<sha256>[.part]     what institutions push, resumable by offset
    updates/<job>/<round>/<institution>.<sha256>    updates taken into a round until it is folded, never given out
    sealed/<job>/<institution>.<sha256>             updates that are kept for changes of their job, never given out

The functions block; call them off the event loop.
"""

import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from veilfed.errors import Code, VeilfedError
from veilfed.files import sync_folder, write_atomic
from veilfed.protocol import CHUNK_BYTES
from veilfed.wire.tensors import digest

__all__ = ["Artifacts", "Ref", "Upload"]

# Uploads that one institution may have in one job at a time; older ones make room.
MAX_UPLOADS = 4
FOLDERS = ("models", "uploads", "updates", "sealed")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Ref:
    """An artifact: the SHA-256 (hexadecimal) and the number of its bytes."""

    sha256: str
    size: int


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None


class Upload:
    """An upload under way. Another upload of the same artifact, such as after a broken link, takes it over.

    Its methods raise VeilfedError(CANCELLED) when it was taken over.
    """

    def __init__(self, part: Path, whole: Path, ref: Ref, offset: int) -> None:
        self._part, self._whole, self._ref = part, whole, ref
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        with _explained(part):
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
            self._file = os.fdopen(descriptor, "r+b")
            arrived = os.fstat(descriptor).st_size
            if offset > arrived:
                self.close()
                raise VeilfedError(
                    Code.ARTIFACT_INVALID, f"upload: offset {offset} is beyond the {arrived} bytes that have arrived"
                )
            self._file.truncate(offset)
        self.received = offset

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with self._lock, _explained(self._part):
            if self._file is None:
                raise VeilfedError(Code.CANCELLED, "upload: another upload of the same artifact took over")
            yield self._file

    def resume(self) -> None:
        """Reads what an earlier attempt has left, before anything is written. In pieces: it may be taken over."""
        chunk = b"first"
        while chunk:
            with self._opened() as file:
                chunk = file.read(CHUNK_BYTES)
                self._digest.update(chunk)

    def write(self, chunk: bytes) -> None:
        """Appends. Raises VeilfedError(ARTIFACT_INVALID) beyond the announced size."""
        if self.received + len(chunk) > self._ref.size:
            raise VeilfedError(Code.ARTIFACT_INVALID, f"upload: more than the announced {self._ref.size} bytes")
        with self._opened() as file:
            file.write(chunk)
            self._digest.update(chunk)
        self.received += len(chunk)

    def finish(self) -> bool:
        """Whether the artifact is whole now. Raises VeilfedError(ARTIFACT_INVALID) when its digest is wrong."""
        if self.received < self._ref.size:
            return False
        with self._opened() as file:
            file.flush()
            os.fsync(file.fileno())
            if self._digest.hexdigest() != self._ref.sha256:
                self._part.unlink()
                raise VeilfedError(Code.ARTIFACT_INVALID, "upload: the bytes do not have the announced SHA-256")
            self._part.replace(self._whole)
        return True

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
                self._file = None


class Artifacts:
    """The folder. One process at a time: `open` locks it."""

    def __init__(self, folder: Path, lock: BinaryIO) -> None:
        self._models, self._uploads, self._updates, self._sealed = (folder / name for name in FOLDERS)
        self._lock = lock
        self._guard = threading.Lock()
        self._running: dict[Path, Upload] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Makes the folder if need be. Raises VeilfedError(FILE_UNUSABLE), also when another process has it."""
        with _explained(folder):
            for part in (folder, *(folder / name for name in FOLDERS)):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (folder / "lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise VeilfedError(
                Code.FILE_UNUSABLE, f"{folder}: another aggregator is using this folder", "Stop the other one first."
            ) from None
        with _explained(folder):
            for half in (folder / "models").glob("*/.*.tmp"):  # of a process that was killed
                half.unlink()
        return cls(folder, lock)

    def close(self) -> None:
        self._lock.close()

    # Models.

    def put_model(self, data: bytes) -> Ref:
        """Keeps a model; the same bytes are kept once."""
        ref = Ref(digest(data), len(data))
        path = self._model(ref.sha256)
        with _explained(path):
            path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, data)
        return ref

    def _model(self, sha256: str) -> Path:
        return self._models / sha256[:2] / _name(sha256)

    def model(self, sha256: str) -> bytes:
        """Raises VeilfedError(STATE_CORRUPT) when it is gone or damaged."""
        try:
            data = self._model(sha256).read_bytes()
        except OSError:
            data = b""
        if digest(data) != sha256:
            raise VeilfedError(Code.STATE_CORRUPT, f"model {sha256[:12]} is missing or damaged")
        return data

    def chunks(self, sha256: str, offset: int) -> Iterator[bytes]:
        """A model's bytes from `offset` on, in pieces of at most 1 MiB."""
        path = self._model(sha256)
        with _explained(path), path.open("rb") as file:
            file.seek(min(offset, os.fstat(file.fileno()).st_size))
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    # Uploads.

    def _folder(self, job_id: str, institution: str) -> Path:
        folder = self._uploads / job_id / institution
        with _explained(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def arrived(self, job_id: str, institution: str, sha256: str) -> tuple[int, bool]:
        """(bytes that have arrived, whether that is all)."""
        path = self._uploads / job_id / institution / _name(sha256)
        for candidate, whole in ((path, True), (path.with_name(f"{sha256}.part"), False)):
            with _explained(candidate), suppress(FileNotFoundError):
                return candidate.stat().st_size, whole
        return 0, False

    def upload(self, job_id: str, institution: str, ref: Ref, offset: int) -> Upload:
        """Starts or resumes an upload; the oldest uploads of the institution make room for it."""
        folder, name = self._folder(job_id, institution), _name(ref.sha256)
        _make_room(folder, name)
        part = folder / f"{name}.part"
        with self._guard:
            before = self._running.pop(part, None)
            if before is not None:
                before.close()
            upload = Upload(part, folder / name, ref, offset)
            self._running[part] = upload
        try:
            upload.resume()  # takes long for a long part; other uploads begin meanwhile
        except BaseException:
            self.release(upload)
            raise
        return upload

    def release(self, upload: Upload) -> None:
        """Closes an upload; what has arrived stays."""
        upload.close()
        with self._guard:
            for part, other in list(self._running.items()):
                if other is upload:
                    del self._running[part]

    def uploaded(self, job_id: str, institution: str, sha256: str) -> bytes:
        """Raises VeilfedError(ARTIFACT_INVALID) when the upload is missing or partial.

        Its bytes had the digest when they arrived; the fold checks it again.
        """
        return _read(self._uploads / job_id / institution / _name(sha256), sha256)

    def drop_upload(self, job_id: str, institution: str, sha256: str) -> None:
        """Removes an upload that is needed no more, if there is one."""
        with suppress(OSError, VeilfedError):
            (self._uploads / job_id / institution / _name(sha256)).unlink()

    # Updates of a round, or sealed ones, which have no number.

    def _update(self, job_id: str, number: int | None, institution: str, sha256: str) -> Path:
        folder = self._sealed / job_id if number is None else self._updates / job_id / str(number)
        return folder / f"{institution}.{_name(sha256)}"

    def put_update(self, job_id: str, number: int | None, institution: str, data: bytes) -> str:
        """Keeps the bytes of an update; returns their SHA-256."""
        sha256 = digest(data)
        path = self._update(job_id, number, institution, sha256)
        with _explained(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, data)
        return sha256

    def keep_upload(self, job_id: str, number: int | None, institution: str, sha256: str) -> None:
        """Keeps the file of a whole upload, which is on the disk already, as the update."""
        upload = self._uploads / job_id / institution / _name(sha256)
        path = self._update(job_id, number, institution, sha256)
        with _explained(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # the same update, sent again after its receipt was lost
                path.hardlink_to(upload)
        sync_folder(path.parent)

    def update(self, job_id: str, number: int | None, institution: str, sha256: str) -> bytes:
        """Raises VeilfedError(ARTIFACT_INVALID) when it is missing or damaged."""
        data = _read(self._update(job_id, number, institution, sha256), sha256)
        if digest(data) != sha256:
            raise VeilfedError(Code.ARTIFACT_INVALID, f"artifact {sha256[:12]} is damaged")
        return data

    def drop_updates(self, job_id: str, number: int) -> None:
        """Removes the updates of a round that has been folded."""
        shutil.rmtree(self._updates / job_id / str(number), ignore_errors=True)

    def drop_job(self, job_id: str) -> None:
        """Removes uploads and updates of a job that has ended. Its models stay, and what is sealed."""
        for folder in (self._uploads, self._updates):
            shutil.rmtree(folder / job_id, ignore_errors=True)

    def drop_sealed(self, job_id: str, keep: Collection[tuple[str, str]]) -> None:
        """Removes the sealed updates of a job but those to keep: (institution, SHA-256)."""
        names = {f"{institution}.{sha256}" for institution, sha256 in keep}
        folder = self._sealed / job_id
        with _explained(folder), suppress(FileNotFoundError):
            for path in folder.iterdir():
                if path.name not in names:
                    path.unlink(missing_ok=True)
            if not names:
                folder.rmdir()

    def jobs(self) -> set[str]:
        """The jobs that have uploads or updates, sealed ones too."""
        folders = (self._uploads, self._updates, self._sealed)
        return {path.name for folder in folders for path in folder.iterdir()}


def _name(sha256: str) -> str:
    if not _SHA256.fullmatch(sha256):
        raise VeilfedError(Code.ARTIFACT_INVALID, "expected a SHA-256 in lower-case hexadecimal")
    return sha256


def _read(path: Path, sha256: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise VeilfedError(Code.ARTIFACT_INVALID, f"artifact {sha256[:12]} has not arrived as a whole") from None
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None


def _make_room(folder: Path, keep: str) -> None:
    with _explained(folder):
        others = [path for path in folder.iterdir() if path.name.removesuffix(".part") != keep]
        others.sort(key=lambda path: path.stat().st_mtime)
        for path in others[: max(0, len(others) - MAX_UPLOADS + 1)]:
            path.unlink(missing_ok=True)
