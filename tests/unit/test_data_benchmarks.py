"""CIFAR-10, CIFAR-100, SVHN and DTD from files in the forms that their authors publish."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from scipy.io import savemat

from client_agent.data import standard
from client_agent.data.config import DataConfig
from client_agent.data.source import Samples, load
from tests.support.fuzz import changed, profile
from veilfed.errors import Code, VeilfedError

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
RNG = np.random.default_rng(0)


def loaded(source: str, root: Path, **keys: object) -> Samples:
    return load(CONFIG.validate_python({"source": source, "root": root, **keys}))


def refused(source: str, root: Path, **keys: object) -> VeilfedError:
    with pytest.raises(VeilfedError) as caught:
        loaded(source, root, **keys)
    return caught.value


def pixels_of(image: object) -> Any:
    assert isinstance(image, bytes)
    return np.asarray(Image.open(io.BytesIO(image)))


def pictures(count: int) -> Any:
    return RNG.integers(0, 256, (count, 32, 32, 3), np.uint8)


def record(labels: list[int], image: Any) -> bytes:
    """Colour by colour, row by row, byte by byte: as the authors describe a record."""
    planes = [int(image[row, column, colour]) for colour in range(3) for row in range(32) for column in range(32)]
    return bytes([*labels, *planes])


# CIFAR


@pytest.mark.parametrize("above", [False, True])
def test_cifar_10_has_its_classes_and_exact_pixels(tmp_path: Path, above: bool) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    images = pictures(11)
    for number in range(5):
        pair = (2 * number, 2 * number + 1)
        (folder / f"data_batch_{number + 1}.bin").write_bytes(b"".join(record([n], images[n]) for n in pair))
    (folder / "test_batch.bin").write_bytes(record([9], images[10]) + record([3], images[0]))
    root = tmp_path if above else folder
    train, test = loaded("cifar-10", root), loaded("cifar-10", root, split="test")
    assert tuple(train.labels) == standard.classes("cifar-10")
    assert test.labels == ["truck", "cat"]
    assert all(np.array_equal(pixels_of(found), image) for found, image in zip(train.inputs, images, strict=False))
    assert test.groups[1] == train.groups[0]  # equal images are one group


def test_cifar_100_has_the_fine_classes(tmp_path: Path) -> None:
    images = pictures(3)
    fine = [0, 57, 99]
    (tmp_path / "train.bin").write_bytes(b"".join(record([19, f], i) for f, i in zip(fine, images, strict=True)))
    samples = loaded("cifar-100", tmp_path)
    assert samples.labels == ["apple", "pear", "worm"]
    assert np.array_equal(pixels_of(samples.inputs[2]), images[2])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("cifar-10", ["data_batch_1", "test_batch", "batches.meta"]),
        ("cifar-10", ["cifar-10-batches-py/data_batch_1"]),
        ("cifar-100", ["train", "test", "meta"]),
        ("cifar-100", ["cifar-100-python/train"]),
    ],
)
def test_the_pickled_version_is_refused_unread(tmp_path: Path, source: str, names: list[str]) -> None:
    root = tmp_path / "set"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(pickle.dumps(_Harm(tmp_path / "harm")))
    error = refused(source, root)
    assert error.code is Code.DATA_INVALID
    assert str(root) in error.message
    assert "pickled" in error.message
    assert "binary version" in (error.hint or "")
    assert not (tmp_path / "harm").exists()
    # Nor is it when it is called like a file of the binary version.
    (root / ("train.bin" if source == "cifar-100" else "data_batch_1.bin")).write_bytes(
        pickle.dumps(_Harm(tmp_path / "harm"))
    )
    assert refused(source, root).code is Code.DATA_INVALID
    assert not (tmp_path / "harm").exists()


class _Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.path,)


def test_a_bad_file_of_cifar_is_refused_by_file_and_record(tmp_path: Path) -> None:
    good = b"".join(record([0, number], image) for number, image in enumerate(pictures(3)))
    path = tmp_path / "train.bin"
    for data, expected in [
        (good[:-1], f"{path}: 9221 bytes; CIFAR-100 has records of 3074 bytes"),
        (b"", f"{path}: 0 bytes"),
        (good + record([0, 100], pictures(1)[0]), f"{path}: record 4 has a class that is not from 0 to 99"),
        (good[:3074] * 2, "all 2 samples are of one class"),
    ]:
        path.write_bytes(data)
        error = refused("cifar-100", tmp_path)
        assert error.code is Code.DATA_INVALID
        assert expected in error.message
    assert f"{tmp_path / 'test.bin'}: no such file" in refused("cifar-100", tmp_path, split="test").message
    assert "no data_batch_1.bin here" in refused("cifar-10", tmp_path).message
    assert refused("cifar-10", tmp_path / "nowhere").code is Code.FILE_UNUSABLE


# SVHN


def svhn(path: Path, images: Any, labels: Any, **options: Any) -> None:
    savemat(path, {"X": np.asarray(images).transpose(1, 2, 3, 0), "y": np.asarray(labels)}, **options)


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn_s_ten_is_the_digit_zero(tmp_path: Path, compressed: bool) -> None:
    images = pictures(10)
    svhn(tmp_path / "train_32x32.mat", images, np.arange(1, 11, dtype=np.uint8)[:, None], do_compression=compressed)
    samples = loaded("svhn", tmp_path)
    assert samples.labels == list("1234567890")
    assert sorted(samples.labels) == list(standard.classes("svhn"))
    assert all(np.array_equal(pixels_of(found), image) for found, image in zip(samples.inputs, images, strict=True))


def test_a_bad_file_of_svhn_is_refused_by_file_and_image(tmp_path: Path) -> None:
    path, images = tmp_path / "test_32x32.mat", pictures(3)
    for labels, expected in [
        ([[1], [0], [10]], "the class of image 2 is not a whole number from 1 to 10"),
        ([[1], [2], [11]], "the class of image 3"),
        ([[1], [2.5], [3]], "the class of image 2"),
        ([[1], [2]], "3 numbers are needed"),
        ([[2], [2], [2]], "one class"),
    ]:
        svhn(path, images, labels)
        error = refused("svhn", tmp_path, split="test")
        assert error.code is Code.DATA_INVALID
        assert str(path) in error.message
        assert expected in error.message
    svhn(path, images.astype(float), [[1], [2], [3]])
    assert "`X` is float64 [32, 32, 3, 3]" in refused("svhn", tmp_path, split="test").message
    savemat(path, {"y": [[1], [2]]})
    assert "needs the array `X`" in refused("svhn", tmp_path, split="test").message
    path.write_bytes(b"MATLAB 7.3 MAT-file" + bytes(105) + b"\0\2IM" + bytes(512))
    assert "version 5 is needed" in refused("svhn", tmp_path, split="test").message
    assert "no such file" in refused("svhn", tmp_path, split="extra").message


def test_any_file_of_svhn(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    svhn(path, pictures(2), [[1], [10]])
    whole = path.read_bytes()

    # Changes of the start and of the end hit the structure, not the pixels.
    @profile(100)
    @given(st.one_of(changed(whole), changed(whole[:200]).map(lambda start: start + whole[200:])))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            samples = loaded("svhn", tmp_path)
        except VeilfedError as error:
            assert error.code is Code.DATA_INVALID  # noqa: PT017  either outcome is right
            return
        assert len(samples) == len(samples.inputs) == 2

    check()


# DTD


def dtd(root: Path) -> Path:
    for name in ("banded", "polka-dotted", "zigzagged"):
        (root / "images" / name).mkdir(parents=True)
        for number in (1, 2):
            file = root / "images" / name / f"{name}_{number:04}.jpg"
            Image.fromarray(RNG.integers(0, 256, (20, 30, 3), np.uint8)).save(file)
    (root / "labels").mkdir()
    (root / "labels" / "train1.txt").write_text("zigzagged/zigzagged_0002.jpg\nbanded/banded_0001.jpg\n")
    return root


@pytest.mark.parametrize("above", [False, True])
def test_dtd_as_a_whole_and_by_a_list(tmp_path: Path, above: bool) -> None:
    root = dtd(tmp_path / "dtd")
    whole = loaded("dtd", tmp_path if above else root)
    assert whole.labels == ["banded"] * 2 + ["polka-dotted"] * 2 + ["zigzagged"] * 2
    listed = loaded("dtd", tmp_path if above else root, split="train1")
    assert listed.labels == ["zigzagged", "banded"]
    assert listed.inputs[0] == (root / "images" / "zigzagged" / "zigzagged_0002.jpg").read_bytes()
    assert len(standard.classes("dtd")) == 47


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("banded/banded_0009.jpg", "the image of line 2 is missing"),
        ("zigzagged/zigzagged_0001.jpg", "line 2 is the same as line 1"),
        ("../secret.jpg", "line 2 is not CLASS/FILE"),
        ("banded/../../secret.jpg", "line 2 is not CLASS/FILE"),
        ("/banded", "line 2 is not CLASS/FILE"),
        ("", "line 2 is not CLASS/FILE"),
        ("\xff", "not UTF-8"),
    ],
)
def test_a_bad_list_is_refused_by_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    root = dtd(tmp_path)
    path = root / "labels" / "val2.txt"
    path.write_bytes(f"zigzagged/zigzagged_0001.jpg\n{line}\n".encode("latin-1"))
    error = refused("dtd", root, split="val2")
    assert error.code is Code.DATA_INVALID
    assert f"{path}: {expected}" in error.message


def test_a_wrong_folder_or_class_of_dtd_is_refused(tmp_path: Path) -> None:
    root = dtd(tmp_path / "dtd")
    assert "test9.txt: no such file" in refused("dtd", root, split="test9").message
    assert "no folder 'images' here" in refused("dtd", root / "labels").message
    with pytest.raises(ValidationError, match="split"):
        loaded("dtd", root, split="../train1")
    (root / "images" / "banded").rename(root / "images" / "plaid")
    assert "'plaid' is no class of DTD" in refused("dtd", root).message
    broken = root / "images" / "zigzagged" / "zigzagged_0001.jpg"
    broken.write_bytes(b"no image")
    assert f"{broken}: not an image" in refused("dtd", root).message
