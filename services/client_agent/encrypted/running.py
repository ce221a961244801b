"""A pass that is under way, on the institution's disk: its name, what it is of, and the outputs that came."""

import hashlib
import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilfed.ckks.samples import Arranged
from veilfed.files import write_atomic

__all__ = ["RunningPass"]

Real = NDArray[np.float64]


class RunningPass:
    """A pass that is under way, on disk."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.name = folder, name

    @classmethod
    def of(cls, folder: Path, version: str, arranged: Arranged) -> "RunningPass":
        """The pass of these samples that was begun, or a new one."""
        place, of = folder / "pass.json", _digest(version, arranged)
        if place.exists():
            found = json.loads(place.read_bytes())
            if found["of"] == of:
                return cls(folder, found["name"])
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        name = secrets.token_hex(16)
        write_atomic(place, json.dumps({"name": name, "of": of}).encode())
        return cls(folder, name)

    def has(self, block: int) -> bool:
        return self._place(block).exists()

    def keep(self, block: int, slots: Real) -> None:
        write_atomic(self._place(block), np.ascontiguousarray(slots, np.float32).tobytes())

    def outputs(self, released: Sequence[int], slots: int) -> list[Real]:
        """Channels [d, slots] of each."""
        data = [self._place(block).read_bytes() for block in released]
        return [np.frombuffer(one, np.float32).astype(np.float64).reshape(-1, slots) for one in data]

    def _place(self, block: int) -> Path:
        return self._folder / f"output-{block}.bin"


def _digest(version: str, arranged: Arranged) -> str:
    hashed = hashlib.sha256(version.encode())
    for part in (arranged.channels, arranged.mask):
        hashed.update(np.ascontiguousarray(part).data)
    return hashed.hexdigest()
