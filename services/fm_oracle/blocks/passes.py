"""A batch of samples on its way through the blocks, on disk: what is there is enough to go on after a crash.

FOLDER/VERSION/INSTITUTION/PASS/pass.json      the blocks that are released in it, and the name of its keys
FOLDER/VERSION/INSTITUTION/PASS/mask.bin       the ciphertext of the mask; padding.bin likewise
FOLDER/VERSION/INSTITUTION/PASS/stream-H.bin   the stream after H halves of blocks; empty after the last
FOLDER/VERSION/INSTITUTION/PASS/output-L.bin   the released output of block L, with its flood: it is made once
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from fm_oracle.encrypted.ciphertexts import Ciphertexts
from veilfed.ckks.basis import Basis
from veilfed.ckks.messages import Expected, ciphertext_messages, read_ciphertexts
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.v1.encrypted_pb2 import CiphertextBatch
from veilfed.wire.frames import joined, read_frames

__all__ = ["PassFolder", "Passes"]

# Of one institution; those that were touched longest ago go.
MAX_PASSES = 4
_PASS = re.compile(r"[0-9a-f]{32,64}")
_STREAM = re.compile(r"stream-([0-9]+)\.bin")


class PassFolder:
    """One pass. Methods block."""

    def __init__(self, path: Path, basis: Basis) -> None:
        self.path, self._basis = path, basis

    @property
    def released(self) -> tuple[int, ...]:
        """The blocks, from 1, whose outputs leave in this pass."""
        return tuple(self._about("released"))

    @property
    def keys(self) -> str:
        """The name of the keys that its ciphertexts are under."""
        return str(self._about("keys"))

    def _about(self, name: str) -> Any:
        try:
            return json.loads((self.path / "pass.json").read_bytes())[name]
        except (OSError, ValueError, KeyError):
            raise VeilfedError(Code.STATE_CORRUPT, f"{self.path}: not a pass") from None

    @property
    def halves(self) -> int | None:
        """Halves of blocks that are done; None before the inputs are there."""
        found = [int(match[1]) for path in self.path.iterdir() if (match := _STREAM.fullmatch(path.name))]
        return max(found, default=None)

    def keep(self, name: str, x: Ciphertexts) -> None:
        """Keeps a batch. Raises VeilfedError(FILE_UNUSABLE)."""
        write_atomic(self.path / f"{name}.bin", joined(ciphertext_messages(x.values, x.scale, self._basis)))

    def keep_stream(self, halves: int, x: Ciphertexts | None) -> None:
        """Keeps the stream after so many halves, and then drops the one before it; None at the end of the pass."""
        if x is None:
            write_atomic(self.path / f"stream-{halves}.bin", b"")
        else:
            self.keep(f"stream-{halves}", x)
        for path in self.path.glob("stream-*.bin"):
            if path.name != f"stream-{halves}.bin":
                path.unlink()

    def read(self, name: str, count: int) -> Ciphertexts:
        """What was kept. Raises VeilfedError: FILE_UNUSABLE, STATE_CORRUPT."""
        path = self.path / f"{name}.bin"
        first = next(read_frames(path, CiphertextBatch), CiphertextBatch())
        expected = Expected(count, first.limbs, first.components)
        try:
            values, scale = read_ciphertexts(read_frames(path, CiphertextBatch), expected, self._basis)
        except VeilfedError as error:
            raise VeilfedError(Code.STATE_CORRUPT, f"{path}: {error.message}") from None
        return Ciphertexts(values, scale)

    def messages(self, block: int) -> list[CiphertextBatch]:
        """The released output of a block, as it was kept; none where it is not."""
        path = self.path / f"output-{block}.bin"
        return list(read_frames(path, CiphertextBatch)) if path.exists() else []


class Passes:
    """The passes of all institutions through one student; those through others are removed. Methods block."""

    def __init__(self, folder: Path, version: str, basis: Basis) -> None:
        self._folder, self._basis = folder / version, basis
        if not self._folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)

    def find(self, institution: str, name: str) -> PassFolder | None:
        """A pass that was begun. Raises VeilfedError(INPUT_INVALID) for an odd name."""
        if not _PASS.fullmatch(name):
            raise VeilfedError(Code.INPUT_INVALID, "the pass is not named by 32 to 64 lower-case hexadecimal digits")
        found = PassFolder(self._folder / institution / name, self._basis)
        if not (found.path / "pass.json").exists():
            return None
        found.path.touch()
        return found

    def begin(self, institution: str, name: str, keys: str, released: tuple[int, ...]) -> PassFolder:
        """A new pass. Raises VeilfedError(FILE_UNUSABLE)."""
        path = self._folder / institution / name
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
        write_atomic(path / "pass.json", json.dumps({"released": released, "keys": keys}).encode())
        others = sorted(path.parent.iterdir(), key=lambda other: other.stat().st_mtime)
        for other in others[:-MAX_PASSES]:
            shutil.rmtree(other, ignore_errors=True)
        return PassFolder(path, self._basis)
