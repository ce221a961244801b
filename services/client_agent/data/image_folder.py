"""Images in folders: ROOT/DOMAIN/CLASS/FILE, the layout of PACS, Office-Home, VLCS and their like."""

import io
import warnings
from pathlib import Path

from PIL import Image

from client_agent.data.config import ImageFolderConfig
from client_agent.data.samples import Samples, check_labels, content_group, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["check_image", "load"]

ENDINGS = {".png", ".jpg", ".jpeg", ".webp"}
FORMATS = ("PNG", "JPEG", "WEBP")  # what the oracle takes
MAX_PIXELS = 16_000_000  # what the oracle takes
MAX_FILE_BYTES = 3 * 1024 * 1024  # an image travels in one message


def load(config: ImageFolderConfig) -> Samples:
    """All images below the folder, classes and files in the order of their names. Hidden files are left out.

    Raises VeilfedError: DATA_INVALID, or FILE_UNUSABLE for what cannot be read.
    """
    folder = config.root / config.domain if config.domain else config.root
    images, labels, groups = [], [], []
    for path in _files(folder):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
        check_image(data, str(path))
        images.append(data)
        labels.append(path.parent.name)
        groups.append(path.stem if config.group == "name" else content_group(data))
    if not images:
        raise invalid(f"{folder}: no images in folders of classes (CLASS/*.png, *.jpg, *.jpeg or *.webp)")
    check_labels(labels, str(folder))
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


def check_image(data: bytes, where: str) -> None:
    """Decodes an image, so that a bad one is named here and not by the oracle. Raises DATA_INVALID."""
    if len(data) > MAX_FILE_BYTES:
        raise invalid(f"{where}: {len(data)} bytes; at most {MAX_FILE_BYTES} are possible: make it smaller")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images; the limit here is the oracle's, checked before anything is unpacked.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
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
