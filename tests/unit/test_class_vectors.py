"""Class vectors in files, and the prompts that they are made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.class_vectors import read_prompts
from veilfed.errors import Code, VeilfedError
from veilfed.wire.class_vectors import read_class_vectors, write_class_vectors

VECTORS = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_vectors_come_back_in_the_order_of_the_job(tmp_path: Path) -> None:
    file = tmp_path / "vectors.npz"
    write_class_vectors(file, ["a", "b", "c"], VECTORS)
    np.testing.assert_array_equal(read_class_vectors(file, ["c", "a"]), VECTORS[[2, 0]])
    with pytest.raises(VeilfedError, match="class 'd'") as refused:
        read_class_vectors(file, ["a", "d"])
    assert refused.value.code is Code.INPUT_INVALID


def save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"classes": np.array(["a", "b", "c"])},
        {"classes": np.array(["a", "b"]), "class_vectors": VECTORS},
        {"classes": np.array(["a", "b", "c"]), "class_vectors": VECTORS.astype(np.float64)},
        {"classes": np.array(["a", "b", "c"]), "class_vectors": VECTORS.reshape(3, 2, 2)},
        {"classes": np.array(["a", "b", "c"], object), "class_vectors": VECTORS},
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    file = tmp_path / "vectors.npz"
    save(file, arrays)
    with pytest.raises(VeilfedError, match=r"vectors\.npz") as refused:
        read_class_vectors(file, ["a"])
    assert refused.value.code is Code.INPUT_INVALID


@pytest.mark.parametrize("data", [b"", b"text", b"PK\x03\x04 not a whole archive", b"\x93NUMPY"])
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "vectors.npz"
    file.write_bytes(data)
    with pytest.raises(VeilfedError) as refused:
        read_class_vectors(file, ["a"])
    assert refused.value.code is Code.INPUT_INVALID
    with pytest.raises(VeilfedError) as missing:
        read_class_vectors(tmp_path / "none.npz", ["a"])
    assert missing.value.code is Code.FILE_UNUSABLE


def test_prompts_are_one_or_several_for_each_class(tmp_path: Path) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text("negative: a bad review\npositive: [a good review, praise]\n")
    assert read_prompts(file) == {"negative": ["a bad review"], "positive": ["a good review", "praise"]}


@pytest.mark.parametrize("text", ["a: x\n", "a: x\nb: []\n", "a: x\nb: ''\n", "a: x\nb: 3\n", "- a\n", "a: x\na: y\n"])
def test_prompts_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text(text)
    with pytest.raises(VeilfedError, match=r"prompts\.yaml") as refused:
        read_prompts(file)
    assert refused.value.code is Code.INPUT_INVALID
