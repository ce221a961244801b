"""FEMNIST from files as LEAF writes them."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from client_agent.data import standard
from client_agent.data.config import DataConfig
from client_agent.data.source import Samples, load, split
from veilfed.errors import Code, VeilfedError

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
PRIVATE = "f0001_41"  # a writer; must not be in an error


def writer(seed: int, classes: list[int]) -> dict[str, Any]:
    """As LEAF: bytes divided by 255, row by row."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(classes), 784))
    return {"x": (pixels / 255).tolist(), "y": classes}


def write(root: Path, files: list[dict[str, dict[str, Any]]]) -> Path:
    root.mkdir(exist_ok=True)
    for number, users in enumerate(files):
        document = {"users": list(users), "num_samples": [len(user["y"]) for user in users.values()]}
        (root / f"all_data_{number}.json").write_text(json.dumps({**document, "user_data": users}))
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Seven writers in two files; each writes 0, 9, A, Z, a, z and one twice."""
    users = [writer(seed, [0, 9, 10, 35, 36, 61, 61]) for seed in range(7)]
    named = {f"f000{number}_{number}": user for number, user in enumerate(users)}
    first, second = dict(list(named.items())[:4]), dict(list(named.items())[4:])
    return write(tmp_path / "all_data", [first, second])


def loaded(root: Path, **keys: object) -> Samples:
    return load(
        CONFIG.validate_python({"source": "femnist", "root": root, "institution": 1, "institutions": 1, **keys})
    )


def pixels_of(image: str | bytes) -> Any:
    assert isinstance(image, bytes)
    return np.asarray(Image.open(io.BytesIO(image)))


def test_characters_have_their_names_and_exact_pixels(root: Path) -> None:
    samples = loaded(root)
    assert samples.modality == "image"
    assert samples.labels == ["0", "9", "A", "Z", "a", "z", "z"] * 7
    assert samples.groups[:8] == ["f0000_0"] * 7 + ["f0001_1"]
    expected = np.random.default_rng(3).integers(0, 256, (7, 28, 28))
    assert all(np.array_equal(pixels_of(samples.inputs[3 * 7 + index]), expected[index]) for index in range(7))


def test_writers_are_dealt_in_turn_and_none_is_at_two_institutions(root: Path) -> None:
    parts = [loaded(root, institution=number, institutions=3) for number in (1, 2, 3)]
    writers = [list(dict.fromkeys(part.groups)) for part in parts]
    assert writers == [["f0000_0", "f0003_3", "f0006_6"], ["f0001_1", "f0004_4"], ["f0002_2", "f0005_5"]]
    assert sum(len(part) for part in parts) == 7 * 7


def test_all_institutions_at_once_are_what_each_loads(root: Path) -> None:
    found = standard.load_all("femnist", root, institutions=3, characters="digits", group="content")
    sections = standard.sections("femnist", root, institutions=3, characters="digits", group="content")
    assert list(found) == list(sections) == ["writers-1", "writers-2", "writers-3"]
    for name, section in sections.items():
        assert found[name] == load(CONFIG.validate_python(section))


def test_digits_alone_have_ten_classes(root: Path) -> None:
    assert standard.classes("femnist", "digits") == tuple("0123456789")
    assert len(standard.classes("femnist")) == 62
    assert loaded(root, characters="digits").labels == ["0", "9"] * 7


@pytest.mark.parametrize("group", ["writer", "content"])
def test_a_writer_stays_on_one_side_unless_told_otherwise(root: Path, group: str) -> None:
    samples = loaded(root, group=group)
    writers = loaded(root).groups
    train, test = split(samples, standard.classes("femnist"), 0.4, 50)
    both = {writers[index] for index in train} & {writers[index] for index in test}
    assert bool(both) is (group == "content")


def test_one_writer_alone_can_be_divided_by_content(root: Path) -> None:
    samples = loaded(root, institution=7, institutions=7, group="content")
    train, test = split(samples, standard.classes("femnist"), 0.4, 50)
    assert len(train) + len(test) == 7


def test_a_wrong_institution_is_refused(root: Path) -> None:
    with pytest.raises(ValidationError, match="from 1 to 2"):
        loaded(root, institution=3, institutions=2)
    with pytest.raises(VeilfedError, match="7 writers; 8 institutions") as caught:
        loaded(root, institution=2, institutions=8)
    assert caught.value.code is Code.DATA_INVALID


def change(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        document["user_data"][PRIVATE][key] = value

    return apply


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no users": (lambda document: document.pop("users"), "`users`"),
    "no data": (lambda document: document.pop("user_data"), "`user_data`"),
    "a writer without data": (lambda document: document["user_data"].pop(PRIVATE), "writer 2 has no"),
    "a writer twice": (lambda document: document["users"].append(PRIVATE), "writer 3 occurs twice"),
    "a short row": (change("x", [[0.0] * 783, [0.0] * 784]), "writer 2"),
    "rows of another length": (change("x", [[0.0] * 783] * 2), "[2, 783]"),
    "words": (change("x", [["a"] * 784] * 2), "lists of 784"),
    "a missing row": (change("x", [[0.0] * 784]), "[1, 784]"),
    "bytes": (change("x", [[255] * 784] * 2), "between 0 and 1"),
    "not finite": (change("x", [[float("nan")] * 784] * 2), "between 0 and 1"),
    "a class too many": (change("y", [0, 62]), "from 0 to 61"),
    "half a class": (change("y", [0, 0.5]), "from 0 to 61"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_file_and_writer(tmp_path: Path, name: str) -> None:
    spoil, expected = BAD[name]
    root = write(tmp_path / "data", [{"f0000_14": writer(0, [1, 2]), PRIVATE: writer(1, [1, 2])}])
    path = root / "all_data_0.json"
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(VeilfedError) as caught:
        loaded(root)
    assert caught.value.code is Code.DATA_INVALID
    assert str(path) in caught.value.message
    assert expected in caught.value.message
    assert PRIVATE not in caught.value.message


def test_a_folder_without_leaf_s_files_says_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(VeilfedError, match=r"all_data_\*\.json"):
        loaded(tmp_path)
    (tmp_path / "broken.json").write_text('{"users": [')
    with pytest.raises(VeilfedError, match=r"broken\.json: not a JSON file"):
        loaded(tmp_path)
    with pytest.raises(VeilfedError, match="not a folder") as caught:
        loaded(tmp_path / "nowhere")
    assert caught.value.code is Code.FILE_UNUSABLE
