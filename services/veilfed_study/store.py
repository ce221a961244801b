"""Finished parts of a study, a file each: written whole or not at all, so that a study that was stopped goes on."""

import hashlib
import json
from pathlib import Path
from typing import Any

from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic

__all__ = ["Store", "key_of"]


def key_of(*parts: object) -> str:
    """Names everything that a result depends on: SHA-256 of the parts as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Store:
    """A folder of results; each counts only for the key that it was kept with, which is part of its file's name.

    So results of other settings, data or models stay beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        """The result of this name; None if there is none for these settings, data and model."""
        path = self._path(name, key)
        try:
            document = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
        except ValueError:
            raise VeilfedError(
                Code.STATE_CORRUPT, f"{path}: not JSON", "Remove the file; it is computed anew."
            ) from None
        if not isinstance(document, dict) or document.get("key") != key:
            return None
        result: dict[str, Any] = document["result"]
        return result

    def put(self, name: str, key: str, result: dict[str, Any]) -> None:
        """Keeps a result; makes the folder. Raises VeilfedError(FILE_UNUSABLE)."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{self.folder}: {error.strerror}") from None
        text = json.dumps({"key": key, "result": result}, indent=1)
        write_atomic(self._path(name, key), text.encode() + b"\n", mode=0o644)

    def _path(self, name: str, key: str) -> Path:
        return self.folder / f"{name}-{key[:12]}.json"
