"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from the files of their binary version.

A file is records of one label byte (CIFAR-100: two, the coarse and the fine class) and 3,072 bytes: the red, green and
blue planes of 32 x 32 pixels, row by row.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client_agent.data.benchmark_sets import BENCHMARK_SETS
from client_agent.data.config import CifarConfig
from client_agent.data.pixels import png
from client_agent.data.samples import Samples, check_labels, content_group, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["load"]

SIDE = 32


@dataclass(frozen=True)
class _Form:
    """`train` and `test` are the names of the files; `pickled` are files that the Python version has instead."""

    title: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int
    pickled: tuple[str, ...]


FORMS = {
    "cifar-10": _Form(
        title="CIFAR-10",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        label_bytes=1,
        pickled=("data_batch_1", "test_batch", "cifar-10-batches-py"),
    ),
    "cifar-100": _Form(
        title="CIFAR-100",
        folder="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        label_bytes=2,
        pickled=("train", "test", "cifar-100-python"),
    ),
}


def load(config: CifarConfig) -> Samples:
    """The images of one split, in the order of files and records. CIFAR-100's classes are the 100 fine ones.

    Raises VeilfedError: DATA_INVALID, naming file and record, also for the Python version, which is pickled and never
    loaded; FILE_UNUSABLE for what cannot be read.
    """
    form = FORMS[config.source]
    folder = _folder(config.root, form)
    classes = BENCHMARK_SETS[config.source]
    images: list[bytes] = []
    labels: list[str] = []
    for name in form.train if config.split == "train" else form.test:
        _read(folder / name, form, classes, images, labels)
    check_labels(labels, f"{folder}: split {config.split}")
    return Samples("image", images, labels, [content_group(image) for image in images])


def _folder(root: Path, form: _Form) -> Path:
    """The set's own folder: the root, or the folder in it that the archive makes."""
    if not root.is_dir():
        raise VeilfedError(Code.FILE_UNUSABLE, f"{root}: not a folder")
    files = (*form.train, *form.test)
    for folder in (root, root / form.folder):
        if any((folder / name).is_file() for name in files):
            return folder
    if any((root / name).exists() for name in form.pickled):
        raise VeilfedError(
            Code.DATA_INVALID,
            f"{root}: the Python version of {form.title}, whose files are pickled; such files are not loaded",
            f"Get the binary version of {form.title}, with the files {form.train[0]} and {form.test[0]}.",
        )
    raise invalid(
        f"{root}: no {form.train[0]} here or in {form.folder!r}; the binary version of {form.title} is needed"
    )


def _read(path: Path, form: _Form, classes: tuple[str, ...], images: list[bytes], labels: list[str]) -> None:
    """Appends the records of a file."""
    length = form.label_bytes + 3 * SIDE * SIDE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise invalid(f"{path}: no such file; the split needs it") from None
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    if not data or len(data) % length:
        raise invalid(f"{path}: {len(data)} bytes; {form.title} has records of {length} bytes")
    records = np.frombuffer(data, np.uint8).reshape(-1, length)
    numbers = records[:, form.label_bytes - 1]
    if len(bad := np.flatnonzero(numbers >= len(classes))):
        raise invalid(f"{path}: record {bad[0] + 1} has a class that is not from 0 to {len(classes) - 1}")
    planes = records[:, form.label_bytes :].reshape(-1, 3, SIDE, SIDE)
    images += [png(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in planes]
    labels += [classes[number] for number in numbers.tolist()]
