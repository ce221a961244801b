"""What the adapters to models of other libraries share: reading their files, with errors of ours."""

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from veilfed import packages
from veilfed.errors import Code, VeilfedError

__all__ = ["OFFLINE", "digests", "import_library", "loading", "read_json"]

OFFLINE = "HF_HUB_OFFLINE"  # read by huggingface_hub, through which the libraries fetch
MAX_JSON_BYTES = 16 * 1024 * 1024


def import_library(name: str) -> Any:
    """A library of the extra `encoders`, which is not to fetch anything. Raises VeilfedError(PACKAGE_MISSING).

    An oracle reads what is here and reaches for no network; `veilfed oracle fetch` sets the variable otherwise.
    """
    os.environ.setdefault(OFFLINE, "1")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise VeilfedError(
            Code.PACKAGE_MISSING,
            f"the package {error.name} is not installed",
            "Install the model owner's extra: pip install 'veilfed[encoders]'.",
        ) from None


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turns whatever a library raises while it reads a model into VeilfedError(MODEL_MISSING), with its first lines."""
    try:
        yield
    except VeilfedError:
        raise
    except Exception as error:  # noqa: BLE001, RUF100  the libraries raise what their parts raise
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])[:300]
        raise VeilfedError(
            Code.MODEL_MISSING,
            f"{what} cannot be loaded: {type(error).__name__}: {reason}",
            "Fetch published weights with `veilfed oracle fetch` and the model's whole name; check your own files.",
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises VeilfedError(MODEL_MISSING, STATE_CORRUPT or FILE_UNUSABLE)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise VeilfedError(Code.MODEL_MISSING, f"{path}: there is no such file", "Check the model's folder.") from None
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    try:
        document = json.loads(data) if len(data) <= MAX_JSON_BYTES else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise VeilfedError(Code.STATE_CORRUPT, f"{path}: not a JSON object")
    return document


def digests(folder: Path, patterns: Sequence[str]) -> list[str]:
    """ "name SHA-256" of the files of a folder that match. Raises VeilfedError(MODEL_MISSING or FILE_UNUSABLE)."""
    if not folder.is_dir():
        raise VeilfedError(Code.MODEL_MISSING, f"{folder}: there is no such folder", "Check the model's folder.")
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    try:
        return [f"{path.relative_to(folder)} {packages.digest(path)}" for path in files]
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{error.filename or folder}: {error.strerror}") from None
