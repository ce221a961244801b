"""Files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path

from veilfed.errors import Code, VeilfedError

__all__ = ["sync_folder", "write_atomic"]


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces `path` by `data` in one step that survives a crash at any instant.

    The file and its folder are synced, so that after a power cut the path holds the old bytes or the new ones.
    Raises VeilfedError(FILE_UNUSABLE); the old file stays then.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in a folder. Raises VeilfedError(FILE_UNUSABLE)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
