"""Reads fetched files of public data sets."""

import hashlib
from pathlib import Path

from veilfed.errors import Code, VeilfedError
from veilfed.packages import PackageFile, locate

__all__ = ["read"]


def read(file: PackageFile, folder: Path) -> bytes:
    """The bytes of a fetched file, checked against its known digest.

    Raises VeilfedError: DATA_MISSING, FILE_UNUSABLE, or STATE_CORRUPT when the file is not the published one.
    """
    path = locate(file, folder)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise VeilfedError(Code.STATE_CORRUPT, f"{path} is not the published file", "Run `veilfed data fetch` again.")
    return data
