"""SVHN, the cropped digits (Netzer et al., 2011): SPLIT_32x32.mat, MATLAB files of version 5.

X is uint8 [32, 32, 3, n]: row, column, colour, image. y is [n, 1] from 1 to 10, and 10 is the digit 0.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat

from client_agent.data.benchmark_sets import BENCHMARK_SETS
from client_agent.data.config import SvhnConfig
from client_agent.data.pixels import png
from client_agent.data.samples import Samples, check_labels, content_group, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["load"]

SHAPE = (32, 32, 3)


def load(config: SvhnConfig) -> Samples:
    """The images of one split, in the order of the file; classes are the digits.

    Raises VeilfedError: DATA_INVALID, or FILE_UNUSABLE for a file that cannot be read.
    """
    path = config.root / f"{config.split}_32x32.mat"
    pixels, numbers = _arrays(path)
    digits = BENCHMARK_SETS["svhn"]
    labels = [digits[number % 10] for number in numbers.tolist()]
    check_labels(labels, str(path))
    images = [png(np.ascontiguousarray(pixels[..., number])) for number in range(len(labels))]
    return Samples("image", images, labels, [content_group(image) for image in images])


def _arrays(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels [32, 32, 3, n] and classes from 1 to 10 [n]."""
    found = _read(path)
    for name in ("X", "y"):
        if not isinstance(found.get(name), np.ndarray):
            raise invalid(f"{path}: needs the array `{name}`")
    pixels, labels = found["X"], found["y"]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != SHAPE:
        raise invalid(f"{path}: `X` is {pixels.dtype} {list(pixels.shape)}; uint8 [32, 32, 3, n] is needed")
    count = pixels.shape[3]
    if labels.dtype.kind not in "uif" or labels.shape not in {(count, 1), (1, count)}:
        raise invalid(f"{path}: `y` is {labels.dtype} {list(labels.shape)}; {count} numbers are needed")
    numbers = labels.reshape(-1)
    if len(bad := np.flatnonzero(~np.isin(numbers, np.arange(1, 11)))):
        raise invalid(f"{path}: the class of image {bad[0] + 1} is not a whole number from 1 to 10")
    return pixels, numbers.astype(np.int64)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found: dict[str, Any] = loadmat(file, variable_names=["X", "y"])
            return found
    except FileNotFoundError:
        raise invalid(f"{path}: no such file; the cropped digits of SVHN are needed") from None
    except MemoryError:
        raise invalid(f"{path}: not a MATLAB file that can be read") from None
    except OSError as error:
        if error.strerror:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
        raise invalid(f"{path}: not a MATLAB file that can be read") from None
    except Exception:  # noqa: BLE001, RUF100  scipy's reader raises many kinds of errors on broken files
        raise invalid(f"{path}: not a MATLAB file that can be read (version 5 is needed)") from None
