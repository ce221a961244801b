"""Texts or images in a NumPy file."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.data.config import NumpyConfig
from client_agent.data.pixels import png
from client_agent.data.samples import Samples, check_labels, check_texts, content_group, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["load"]

Array = NDArray[Any]


def load(config: NumpyConfig) -> Samples:
    """The arrays as samples; images are encoded as PNG, which loses nothing. Pickled objects are never loaded.

    Raises VeilfedError: DATA_INVALID, or FILE_UNUSABLE for a file that cannot be read.
    """
    where = str(config.path)
    found = _read(config.path)
    if ("texts" in found) == ("images" in found):
        raise invalid(f"{where}: needs one of the arrays `texts` and `images`")
    name = "texts" if "texts" in found else "images"
    if "labels" not in found:
        raise invalid(f"{where}: needs the array `labels`")
    if found[name].ndim == 0:
        raise invalid(f"{where}: `{name}` has no length")
    samples = len(found[name])
    labels = _strings(found["labels"], samples, f"{where}: `labels`")
    check_labels(labels, where)
    groups = _strings(found["groups"], samples, f"{where}: `groups`") if "groups" in found else None
    if name == "texts":
        texts = _strings(found["texts"], samples, f"{where}: `texts`")
        check_texts(texts, where)
        return Samples("text", texts, labels, groups or [content_group(text) for text in texts])
    images = _images(found["images"], where)
    return Samples("image", images, labels, groups or [content_group(image) for image in images])


def _read(path: Path) -> dict[str, Array]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise invalid(f"{path}: one array; an .npz file with named arrays is needed")
        with loaded as file:
            return {name: file[name] for name in ("texts", "images", "labels", "groups") if name in file}
    except (EOFError, ValueError, zipfile.BadZipFile, zlib.error):
        raise invalid(f"{path}: not an .npz file of plain arrays (objects are not loaded)") from None
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror or 'not readable'}") from None


def _strings(array: Array, samples: int, where: str) -> list[str]:
    """A vector of strings or integers, as strings."""
    if array.shape != (samples,) or array.dtype.kind not in "UTiu":
        raise invalid(f"{where} is {array.dtype} {list(array.shape)}; {samples} strings or integers are needed")
    return [str(value) for value in array.tolist()]


def _images(array: Array, where: str) -> list[bytes]:
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or 0 in array.shape:
        raise invalid(f"{where}: `images` is {array.dtype} {list(array.shape)}; uint8 [n, h, w, 3] is needed")
    return [png(pixels) for pixels in array]
