"""Labelled inputs of one institution, and what every source checks."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from veilfed.errors import Code, VeilfedError

__all__ = ["MAX_CHARACTERS", "Samples", "check_labels", "check_texts", "content_group", "invalid"]

MAX_CHARACTERS = 100_000  # of one text: what the oracle takes
MAX_LABEL = 100  # characters of a class name: what a job can name


@dataclass(frozen=True)
class Samples:
    """n inputs of one modality with one class name and one group each.

    `inputs` are texts or encoded images (PNG, JPEG or WebP). Inputs of one group never straddle training and test.
    """

    modality: Literal["text", "image"]
    inputs: Sequence[str] | Sequence[bytes]
    labels: Sequence[str]
    groups: Sequence[str]

    def __len__(self) -> int:
        return len(self.labels)


def invalid(message: str) -> VeilfedError:
    """The error of a source; `message` names the file and the row, never contents."""
    return VeilfedError(Code.DATA_INVALID, message)


def content_group(content: str | bytes) -> str:
    """A group of all equal contents; texts that differ in case and white space alone count as equal."""
    if isinstance(content, str):
        content = " ".join(content.split()).casefold().encode(errors="surrogatepass")
    return hashlib.sha256(content).hexdigest()


def check_texts(texts: Iterable[object], where: str) -> None:
    """Raises DATA_INVALID naming the first row (from 1) that is no text, empty or too long for the oracle."""
    for row, text in enumerate(texts, start=1):
        if not isinstance(text, str) or not text.strip():
            raise invalid(f"{where}: the text of row {row} is empty")
        if len(text) > MAX_CHARACTERS:
            raise invalid(f"{where}: the text of row {row} has more than {MAX_CHARACTERS} characters")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise invalid(f"{where}: the text of row {row} is not valid Unicode")


def check_labels(labels: Sequence[str], where: str) -> None:
    """Raises DATA_INVALID for no samples, an empty or too long class name, or one class alone."""
    if not labels:
        raise invalid(f"{where}: no samples")
    for row, label in enumerate(labels, start=1):
        if not label or len(label) > MAX_LABEL:
            raise invalid(f"{where}: the label of row {row} is empty or longer than {MAX_LABEL} characters")
    if len(set(labels)) < 2:
        raise invalid(f"{where}: all {len(labels)} samples are of one class; there is nothing to learn")
