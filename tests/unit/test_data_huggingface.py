"""Data sets in the layout of `save_to_disk`; tests/encoders reads what the library itself wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter, ValidationError

from client_agent.data.config import DataConfig
from client_agent.data.source import Samples, load
from tests.support.models import png
from veilfed.errors import Code, VeilfedError

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
PRIVATE = "Smith"  # stands in the data; must not be in an error

VALUE = {"dtype": "string", "_type": "Value"}
NAMES = {"names": ["bad", "good"], "_type": "ClassLabel"}


def write(folder: Path, parts: list[Any], features: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05}-of-{len(parts):05}.arrow" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, part.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def texts(texts: list[str | None], labels: list[int | None], **more: list[object]) -> Any:
    return pa.table({"text": pa.array(texts, pa.string()), "label": pa.array(labels, pa.int64()), **more})


def loaded(path: Path, **keys: object) -> Samples:
    return load(CONFIG.validate_python({"source": "huggingface", "path": path, **({"text": "text"} | keys)}))


def error_of(path: Path, **keys: object) -> VeilfedError:
    with pytest.raises(VeilfedError) as caught:
        loaded(path, **keys)
    assert PRIVATE not in caught.value.message
    return caught.value


def test_texts_of_several_files_with_names_of_classes(tmp_path: Path) -> None:
    parts = [texts(["a", "b"], [0, 1], patient=[7, 7]), texts(["B"], [1], patient=[9])]
    path = write(tmp_path / "set", parts, {"text": VALUE, "label": NAMES})
    samples = loaded(path)
    assert (samples.modality, samples.inputs, samples.labels) == ("text", ["a", "b", "B"], ["bad", "good", "good"])
    assert samples.groups[1] == samples.groups[2] != samples.groups[0]
    assert loaded(path, group="patient").groups == ["7", "7", "9"]


def test_labels_without_names_stay_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "set", [texts(["a", "b"], [3, 4])], {"text": VALUE})
    assert loaded(path).labels == ["3", "4"]


def test_a_split_of_several(tmp_path: Path) -> None:
    write(tmp_path / "train", [texts(["a", "b"], [0, 1])], {"label": NAMES})
    write(tmp_path / "test", [texts(["c", "d"], [0, 1])], {"label": NAMES})
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert loaded(tmp_path, split="test").inputs == ["c", "d"]
    for keys in ({}, {"split": "validation"}):
        assert "train, test" in error_of(tmp_path, **keys).message
    assert "leave out `split`" in error_of(tmp_path / "train", split="train").message


def image_table(images: list[bytes | None]) -> Any:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [{"bytes": image, "path": f"{PRIVATE}.png"} for image in images]
    return pa.table({"picture": pa.array(rows, kind), "label": pa.array([0, 1][: len(images)], pa.int64())})


def test_images(tmp_path: Path) -> None:
    images = [png(np.full((4, 4, 3), value, np.uint8)) for value in (0, 1)]
    path = write(tmp_path / "set", [image_table([*images])], {"label": NAMES})
    samples = loaded(path, text=None, image="picture")
    assert (samples.modality, samples.inputs, samples.labels) == ("image", images, ["bad", "good"])
    assert "Image" in error_of(path, text=None, image="label").message


def test_images_that_are_not_in_the_data_set_are_refused(tmp_path: Path) -> None:
    image = png(np.zeros((4, 4, 3), np.uint8))
    path = write(tmp_path / "set", [image_table([image, None])], {"label": NAMES})
    assert "row 2 has no image in it" in error_of(path, text=None, image="picture").message
    path = write(tmp_path / "set", [image_table([image, image[:30]])], {"label": NAMES})
    assert "row 2" in error_of(path, text=None, image="picture").message


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no state": (lambda folder: (folder / "state.json").unlink(), "save_to_disk"),
    "no info": (lambda folder: (folder / "dataset_info.json").unlink(), "save_to_disk"),
    "broken state": (lambda folder: (folder / "state.json").write_text(f"[{PRIVATE}"), "not a JSON object"),
    "no files named": (lambda folder: (folder / "state.json").write_text("{}"), "name the data files"),
    "no files": (lambda folder: (folder / "state.json").write_text('{"_data_files": []}'), "no samples"),
    "a file outside": (
        lambda folder: (folder / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}'),
        "outside",
    ),
    "a missing file": (lambda folder: next(folder.glob("*.arrow")).unlink(), "state.json names it"),
    "a broken file": (lambda folder: next(folder.glob("*.arrow")).write_bytes(PRIVATE.encode() * 20), "Arrow"),
    "an empty file": (lambda folder: next(folder.glob("*.arrow")).write_bytes(b""), "Arrow"),
    "old indices": (
        lambda folder: (folder / "state.json").write_text('{"_indices_data_files": [{"filename": "i.arrow"}]}'),
        "flatten_indices",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "set", [texts([PRIVATE, "b"], [0, 1])], {"label": NAMES})
    spoil, expected = BAD[name]
    spoil(path)
    error = error_of(path)
    assert error.code is Code.DATA_INVALID
    assert str(path) in error.message
    assert expected in error.message


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "no class": (texts([PRIVATE, "b"], [0, None]), "row 2"),
    "an unknown class": (texts([PRIVATE, "b"], [0, -1]), "row 2"),
    "no text": (texts([PRIVATE, None], [0, 1]), "row 2"),
    "one class": (texts([PRIVATE, "b"], [1, 1]), "one class"),
    "no rows": (texts([], []), "no samples"),
    "no column": (pa.table({"words": [PRIVATE, "b"], "label": [0, 1]}), "'text'"),
    "fractions": (pa.table({"text": [PRIVATE, "b"], "label": [0.0, 1.0]}), "double"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_refused(tmp_path: Path, name: str) -> None:
    table, expected = BAD_ROWS[name]
    error = error_of(write(tmp_path / "set", [table], {"label": NAMES}))
    assert error.code is Code.DATA_INVALID
    assert expected in error.message


def test_one_column_of_inputs_is_needed(tmp_path: Path) -> None:
    for keys in ({"text": None}, {"image": "picture"}):
        with pytest.raises(ValidationError, match="name one of the two"):
            loaded(tmp_path, **keys)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    assert error_of(tmp_path / "nowhere").code is Code.FILE_UNUSABLE
