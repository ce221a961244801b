"""Institutions' keys to compute with, on disk under the name that the institution has given them, until they expire.

    FOLDER/INSTITUTION/NAME.keys   the messages as they came
    FOLDER/INSTITUTION/NAME.json   the session: its name, the student's version, when it and the keys expire

Public keys all of them: who has them can compute and encrypt, and read nothing.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from veilfed.ckks.basis import Basis
from veilfed.ckks.keys import EvaluationKeys
from veilfed.ckks.messages import Expected, public_seed, read_ciphertexts, read_keys
from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError
from veilfed.files import sync_folder, write_atomic
from veilfed.v1.blocks_pb2 import OpenSessionRequest
from veilfed.wire.frames import read_frames

__all__ = ["Keys", "Session", "Sessions"]

# Of one institution; those that were opened longest ago go.
MAX_SESSIONS = 2


@dataclass(frozen=True)
class Keys:
    """What is computed with; the public key is [2, limbs, n]."""

    evaluation: EvaluationKeys
    public: Float


@dataclass(frozen=True)
class Session:
    name: str
    version: str
    keys: str
    expires: float


class Sessions:
    """Methods block: call them off the event loop. `steps` are the rotations that keys are needed for."""

    def __init__(
        self,
        folder: Path,
        basis: Basis,
        steps: tuple[int, ...],
        version: str,
        seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Removes what a crash has left, and what has expired. Raises VeilfedError(FILE_UNUSABLE)."""
        self._folder, self._basis, self._steps = folder, basis, steps
        self._version, self._seconds, self._clock = version, seconds, clock
        # The keys that were used last: hundreds of megabytes, read by one at a time.
        self._loaded: tuple[Path, Keys] | None = None
        self._lock = threading.Lock()
        try:
            for path in [*folder.glob("*/.*.tmp"), *folder.glob("*/*.keys")]:
                if path.suffix == ".tmp" or not path.with_suffix(".json").exists():
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
        for institution in folder.glob("*/"):
            self._expire(institution)

    def check_version(self, version: str) -> None:
        """Raises VeilfedError(INPUT_INVALID) for another student than this oracle's."""
        if version != self._version:
            raise VeilfedError(Code.INPUT_INVALID, "the session is for another student than this oracle's")

    def place(self, institution: str, keys: str) -> Path:
        """Where the keys of an institution with this name are kept; makes the folder. Raises VeilfedError."""
        if len(keys) != 64 or not set(keys) <= set("0123456789abcdef"):
            raise VeilfedError(Code.INPUT_INVALID, "the name of the keys is not 64 lower-case hexadecimal digits")
        folder = self._folder / institution
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
        return folder / f"{keys}.keys"

    def reopen(self, institution: str, keys: str) -> Session | None:
        """A new session on keys that are kept; None where they are not, or not any more."""
        place = self.place(institution, keys)
        self._expire(place.parent)
        return self._open(place, keys) if place.exists() else None

    def keep(self, institution: str, keys: str, received: Path) -> Session:
        """A session on keys that came as messages in a file, which is kept if they are whole.

        Raises VeilfedError as veilfed.ckks.messages does.
        """
        place = self.place(institution, keys)
        found = self._read(received, keys)
        with received.open("rb") as file:
            os.fsync(file.fileno())
        received.replace(place)
        sync_folder(place.parent)
        with self._lock:
            self._loaded = place, found
        return self._open(place, keys)

    def _open(self, place: Path, keys: str) -> Session:
        session = Session(secrets.token_hex(16), self._version, keys, self._clock() + self._seconds)
        write_atomic(place.with_suffix(".json"), json.dumps(asdict(session)).encode())
        others = sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in others[:-MAX_SESSIONS]:
            _remove(path)
        return session

    def find(self, institution: str, name: str) -> Session:
        """An open session. Raises VeilfedError(SESSION_INVALID) for one of somebody else, or that is over."""
        for _, session in _sessions(self._folder / institution):
            good = session.expires > self._clock() and session.version == self._version
            if secrets.compare_digest(session.name, name) and good:
                return session
        raise VeilfedError(Code.SESSION_INVALID, "there is no such session, or it has expired", "Open a session again.")

    def keys(self, institution: str, session: Session) -> Keys:
        """The keys of a session. Raises VeilfedError(SESSION_INVALID) where they are gone or damaged."""
        place = self.place(institution, session.keys)
        with self._lock:
            if self._loaded is None or self._loaded[0] != place:
                self._loaded = None  # not both at a time
                try:
                    self._loaded = place, self._read(place, session.keys)
                except VeilfedError:
                    _remove(place.with_suffix(".json"))
                    raise VeilfedError(Code.SESSION_INVALID, "the keys are gone", "Open a session again.") from None
            return self._loaded[1]

    def _expire(self, folder: Path) -> None:
        for path, session in _sessions(folder):
            if session.expires <= self._clock() or session.version != self._version:
                _remove(path)

    def _read(self, path: Path, keys: str) -> Keys:
        """Raises VeilfedError: what veilfed.ckks.messages says of keys that are not whole."""
        public = [m.public_key for m in read_frames(path, OpenSessionRequest) if m.HasField("public_key")]
        expected = Expected(1, self._basis.parameters.limbs, seeded=True, seed=public_seed(keys))
        values, _ = read_ciphertexts(public, expected, self._basis)
        digits = (m.digit for m in read_frames(path, OpenSessionRequest) if m.HasField("digit"))
        return Keys(read_keys(digits, self._steps, self._basis), np.ascontiguousarray(values[0]))


def _sessions(folder: Path) -> Iterator[tuple[Path, Session]]:
    """Those of an institution; one that goes away meanwhile is none."""
    for path in folder.glob("*.json"):
        try:
            yield path, Session(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            continue


def _remove(path: Path) -> None:
    """A session with its keys."""
    path.unlink(missing_ok=True)
    path.with_suffix(".keys").unlink(missing_ok=True)
