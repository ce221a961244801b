"""An institution's own files: tables, folders of images, NumPy files; good ones and bad ones."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from client_agent.data.config import DataConfig
from client_agent.data.source import Samples, load
from tests.support.models import png
from veilfed.errors import Code, VeilfedError

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
PRIVATE = "Smith"  # stands in the bad files; must not be in any error


def loaded(source: str, **keys: object) -> Samples:
    return load(CONFIG.validate_python({"source": source, **keys}))


def error_of(source: str, **keys: object) -> VeilfedError:
    with pytest.raises(VeilfedError) as caught:
        loaded(source, **keys)
    assert PRIVATE not in caught.value.message
    return caught.value


def color(value: int) -> bytes:
    return png(np.full((8, 8, 3), value, np.uint8))


# Tables.


def table(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "letters.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_csv_file_is_taken_as_it_is_written(tmp_path: Path) -> None:
    path = table(tmp_path, '\ufeffid,text,label\n1,"NA, she said",007\n2,"two\nlines",8\n3,two LINES,8\n')
    samples = loaded("table", path=path)
    assert samples.modality == "text"
    assert samples.inputs == ["NA, she said", "two\nlines", "two LINES"]
    assert samples.labels == ["007", "8", "8"]
    assert samples.groups[1] == samples.groups[2] != samples.groups[0]


def test_a_parquet_file_with_named_columns_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "letters.parquet"
    frame = pd.DataFrame(
        {"body": ["a", "b", "b"], "outcome": [0, 1, 1], "patient": [7, 7, 9], "unused": [1.5, None, 2]}
    )
    frame.to_parquet(path)
    samples = loaded("table", path=path, text="body", label="outcome", group="patient")
    assert samples.inputs == ["a", "b", "b"]
    assert samples.labels == ["0", "1", "1"]
    assert samples.groups == ["7", "7", "9"]


def test_several_columns_become_a_sentence_without_what_is_missing(tmp_path: Path) -> None:
    path = table(tmp_path, "age,sex,label\n63,male,yes\n41,,no\n")
    samples = loaded("table", path=path, text=["age", "sex"])
    assert samples.inputs == ["age 63, sex male", "age 41"]


BAD_TABLES: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "no samples"),
    "header alone": ("text,label\n", "no samples"),
    "no label column": (f"text,labels\n{PRIVATE},a\n", "'label'"),
    "column twice": (f"text,text,label\n{PRIVATE},{PRIVATE},a\n", "'text'"),
    "empty text": (f"text,label\n{PRIVATE},a\n  ,b\n", "row 2"),
    "empty label": (f"text,label\n{PRIVATE},a\n{PRIVATE},\n", "row 2"),
    "short row": (f"text,label\n{PRIVATE},a\n{PRIVATE},b\n{PRIVATE}\n", "row 3"),
    "long row": (f"text,label\n{PRIVATE},a\n{PRIVATE},b,{PRIVATE}\n", "line 3"),
    "one class": (f"text,label\n{PRIVATE},a\n{PRIVATE},a\n", "one class"),
    "long text": (f"text,label\n{PRIVATE},a\n{'x' * 100_001},b\n", "row 2"),
    "open quote": (f'text,label\n{PRIVATE},a\n"{PRIVATE},b\n', ""),
    "not UTF-8": (f"text,label\n{PRIVATE} \xe9,a\n".encode("latin-1"), "UTF-8"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_bad_table_is_refused_by_file_and_row(tmp_path: Path, name: str) -> None:
    content, expected = BAD_TABLES[name]
    path = table(tmp_path, content)
    error = error_of("table", path=path)
    assert error.code is Code.DATA_INVALID
    assert str(path) in error.message
    assert expected in error.message


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "letters.parquet"
    path.write_text(f"text,label\n{PRIVATE},a\n")
    assert error_of("table", path=path).code is Code.DATA_INVALID


def test_a_parquet_file_with_a_missing_value_names_its_row(tmp_path: Path) -> None:
    path = tmp_path / "letters.parquet"
    pd.DataFrame({"text": [PRIVATE, "b", "c"], "label": ["x", "y", None]}).to_parquet(path)
    assert "row 3" in error_of("table", path=path).message


# Folders of images.


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_a_domain_of_an_image_folder(tmp_path: Path) -> None:
    files = {
        "sketch/dog/b.png": color(1),
        "sketch/dog/a.JPG": png(np.zeros((4, 4, 3), np.uint8), "JPEG"),
        "sketch/cat/a.webp": png(np.zeros((4, 4, 3), np.uint8), "WEBP"),
        "sketch/cat/copy.png": color(1),
        "sketch/cat/notes.txt": b"passed over",
        "sketch/cat/.hidden.png": b"passed over",
        "sketch/readme.png": b"passed over",
        "photo/dog/c.png": color(2),
    }
    write(tmp_path, files)
    samples = loaded("image-folder", root=tmp_path, domain="sketch")
    assert samples.modality == "image"
    assert samples.labels == ["cat", "cat", "dog", "dog"]
    assert list(samples.inputs) == [
        files[f"sketch/{name}"] for name in ("cat/a.webp", "cat/copy.png", "dog/a.JPG", "dog/b.png")
    ]
    assert samples.groups[1] == samples.groups[3]
    assert len(set(samples.groups)) == 3
    by_name = loaded("image-folder", root=tmp_path / "sketch", group="name")
    assert by_name.labels == samples.labels
    assert by_name.groups == ["a", "copy", "a", "b"]


def bomb() -> bytes:
    """A PNG that claims 30,000 x 30,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def cut_jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    return png(noise, "JPEG")[:-500]


def gif() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(out, "GIF")
    return out.getvalue()


BAD_IMAGES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": PRIVATE.encode,
    "cut PNG": lambda: png(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8))[:-500],
    "cut JPEG": cut_jpeg,
    "bomb": bomb,
    "GIF": gif,
    "too many bytes": lambda: color(0) + bytes(3 * 1024 * 1024),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_is_refused_by_file(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"cat/a.png": color(1), "dog/b.png": BAD_IMAGES[name]()})
    error = error_of("image-folder", root=tmp_path)
    assert error.code is Code.DATA_INVALID
    assert str(tmp_path / "dog" / "b.png") in error.message


def test_a_folder_without_images_or_with_one_class_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"one/cat/a.png": color(1), "none/cat/a.txt": b""})
    assert error_of("image-folder", root=tmp_path, domain="one").code is Code.DATA_INVALID
    assert error_of("image-folder", root=tmp_path, domain="none").code is Code.DATA_INVALID
    assert error_of("image-folder", root=tmp_path, domain="absent").code is Code.FILE_UNUSABLE


@pytest.mark.parametrize("domain", ["..", "../x", "a/b", "", ".hidden"])
def test_a_domain_is_one_folder_below_the_root(tmp_path: Path, domain: str) -> None:
    with pytest.raises(ValidationError):
        CONFIG.validate_python({"source": "image-folder", "root": tmp_path, "domain": domain})


# NumPy files.


def npz(tmp_path: Path, **arrays: Any) -> Path:
    path = tmp_path / "scans.npz"
    np.savez(path, **arrays)
    return path


def test_images_of_a_numpy_file_come_back_pixel_for_pixel(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3)).astype(np.uint8)
    samples = loaded(
        "numpy", path=npz(tmp_path, images=images, labels=np.array([0, 7, 0]), groups=np.array(["p", "q", "p"]))
    )
    assert samples.labels == ["0", "7", "0"]
    assert samples.groups == ["p", "q", "p"]
    for encoded, pixels in zip(samples.inputs, images, strict=True):
        assert isinstance(encoded, bytes)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded))), pixels)


def test_texts_of_a_numpy_file(tmp_path: Path) -> None:
    samples = loaded("numpy", path=npz(tmp_path, texts=np.array(["a", "b", "a"]), labels=np.array(["x", "y", "x"])))
    assert samples.inputs == ["a", "b", "a"]
    assert samples.groups[0] == samples.groups[2] != samples.groups[1]


LABELS = np.array(["x", "y"])
IMAGES = np.zeros((2, 4, 4, 3), np.uint8)
BAD_ARRAYS: dict[str, dict[str, Any]] = {
    "no inputs": {"labels": LABELS},
    "both inputs": {"texts": LABELS, "images": IMAGES, "labels": LABELS},
    "no labels": {"images": IMAGES},
    "fewer labels": {"images": IMAGES, "labels": LABELS[:1]},
    "fewer groups": {"images": IMAGES, "labels": LABELS, "groups": LABELS[:1]},
    "real labels": {"images": IMAGES, "labels": np.array([0.5, 1.5])},
    "real images": {"images": IMAGES.astype(np.float32), "labels": LABELS},
    "one channel": {"images": IMAGES[..., :1], "labels": LABELS},
    "no pixels": {"images": IMAGES[:, :0], "labels": LABELS},
    "scalar": {"texts": np.array("a"), "labels": np.array("x")},
    "one class": {"images": IMAGES, "labels": LABELS[[0, 0]]},
    "empty": {"images": IMAGES[:0], "labels": LABELS[:0]},
    "empty text": {"texts": np.array(["a", " "]), "labels": LABELS},
    "pickled": {"texts": np.array([PRIVATE, None], dtype=object), "labels": LABELS},
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_a_bad_numpy_file_is_refused(tmp_path: Path, name: str) -> None:
    path = npz(tmp_path, **BAD_ARRAYS[name])
    error = error_of("numpy", path=path)
    assert error.code is Code.DATA_INVALID
    assert str(path) in error.message


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 not a zip", "cut"])
def test_what_is_no_npz_file_is_refused(tmp_path: Path, content: bytes | str) -> None:
    path = npz(tmp_path, images=IMAGES, labels=LABELS)
    path.write_bytes(path.read_bytes()[:-30] if isinstance(content, str) else content)
    assert error_of("numpy", path=path).code is Code.DATA_INVALID


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "scans.npy", IMAGES)
    assert error_of("numpy", path=tmp_path / "scans.npy").code is Code.DATA_INVALID


@pytest.mark.parametrize("source", ["table", "numpy"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, source: str) -> None:
    error = error_of(source, path=tmp_path / "absent.npz")
    assert error.code is Code.FILE_UNUSABLE
    assert str(tmp_path / "absent.npz") in error.message
