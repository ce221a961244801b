"""Images in folders: ROOT/DOMAIN/CLASS/FILE."""

import io
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from PIL import Image

from client_agent.data.config import ImageFolderConfig
from client_agent.data.samples import Samples, check_labels, content_group, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["check_image", "load", "read"]

ENDINGS = {".png", ".jpg", ".jpeg", ".webp"}
FORMATS = ("PNG", "JPEG", "WEBP")  # what the oracle takes
MAX_PIXELS = 16_000_000  # what the oracle takes
MAX_FILE_BYTES = 3 * 1024 * 1024  # an image travels in one message
SHRUNK_SIDE = 1024  # pixels of the longer side: more than models look at


def load(config: ImageFolderConfig, shrink: bool = False) -> Samples:
    """All images below the folder, classes and files in the order of their names. Hidden files are left out.

    With `shrink`, images that are larger than the oracle takes are made smaller.

    Raises VeilfedError: DATA_INVALID, or FILE_UNUSABLE for what cannot be read.
    """
    folder = config.root / config.domain if config.domain else config.root
    samples = read(_files(folder), config.group, shrink)
    if not samples.inputs:
        raise invalid(f"{folder}: no images in folders of classes (CLASS/*.png, *.jpg, *.jpeg or *.webp)")
    check_labels(samples.labels, str(folder))
    return samples


def read(paths: Iterable[Path], group: Literal["content", "name"], shrink: bool) -> Samples:
    """The images of these files, each of the class that its folder names; errors as in `load`."""
    images, labels, groups = [], [], []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
        if shrink:
            data = _shrunk(data)
        check_image(data, str(path))
        images.append(data)
        labels.append(path.parent.name)
        groups.append(path.stem if group == "name" else content_group(data))
    return Samples("image", images, labels, groups)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: not a folder")
    try:
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        return [path for name in classes for path in sorted(name.iterdir()) if _is_image(path)]
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{error.filename or folder}: {error.strerror}") from None


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS and not path.name.startswith(".") and path.is_file()


def _shrunk(data: bytes) -> bytes:
    """An image that is too large for the oracle as a JPEG of SHRUNK_SIDE; others, also broken ones, as they are."""
    try:
        with _quiet(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if len(data) <= MAX_FILE_BYTES and image.width * image.height <= MAX_PIXELS:
                return data
            image.draft("RGB", (SHRUNK_SIDE, SHRUNK_SIDE))
            rgba = image.convert("RGBA")
    except Exception:  # noqa: BLE001, RUF100  Pillow's decoders raise many kinds of errors on broken files
        return data
    rgba.thumbnail((SHRUNK_SIDE, SHRUNK_SIDE), Image.Resampling.BICUBIC)
    small = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    out = io.BytesIO()
    small.save(out, "JPEG", quality=95)
    return out.getvalue()


@contextmanager
def _quiet() -> Iterator[None]:
    """Pillow warns of large images; the limit here is the oracle's, checked before anything is unpacked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def check_image(data: bytes, where: str) -> None:
    """Decodes an image, so that a bad one is named here and not by the oracle. Raises DATA_INVALID."""
    if len(data) > MAX_FILE_BYTES:
        raise invalid(f"{where}: {len(data)} bytes; at most {MAX_FILE_BYTES} are possible: make it smaller")
    try:
        with _quiet():
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        pixels = image.width * image.height
        if pixels > MAX_PIXELS:
            raise invalid(f"{where}: {pixels} pixels; at most {MAX_PIXELS} are possible: make it smaller")
        image.draft("RGB", (64, 64))  # a JPEG is decoded at an eighth of its size: enough to find damage
        image.load()
    except VeilfedError:
        raise
    except Exception:  # noqa: BLE001, RUF100  Pillow's decoders raise many kinds of errors on broken files
        raise invalid(f"{where}: not an image that can be decoded (PNG, JPEG or WebP)") from None
