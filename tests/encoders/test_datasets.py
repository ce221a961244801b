"""What the library datasets writes with `save_to_disk` is read without it."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from client_agent.data.config import DataConfig
from client_agent.data.source import Samples, load
from tests.encoders.pictures import PICTURES, opened

pytestmark = pytest.mark.encoders

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)


def loaded(path: Path, **keys: object) -> Samples:
    return load(CONFIG.validate_python({"source": "huggingface", "path": path, **keys}))


def test_texts_with_classes_after_a_selection_and_in_several_files(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"body": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = {"body": [f"text {row}" for row in range(100)], "label": [row % 2 for row in range(100)]}
    whole = datasets.Dataset.from_dict(rows, features=features)
    some = whole.shuffle(seed=0).select(range(40))
    some.save_to_disk(tmp_path / "some", num_shards=3)
    samples = loaded(tmp_path / "some", text="body")
    assert list(samples.inputs) == some["body"][:]
    assert list(samples.labels) == [["bad", "good"][value] for value in some["label"]]
    datasets.DatasetDict({"train": whole, "test": some}).save_to_disk(tmp_path / "splits")
    assert loaded(tmp_path / "splits", text="body", split="test") == samples


@pytest.mark.parametrize("as_file", [True, False])
def test_images_are_in_the_data_set(tmp_path: Path, as_file: bool) -> None:
    import datasets

    paths = [tmp_path / f"{number}.png" for number in range(len(PICTURES))]
    for path, picture in zip(paths, PICTURES, strict=True):
        path.write_bytes(picture)
    images = [str(path) for path in paths] if as_file else [opened(picture) for picture in PICTURES]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    labels = ["cat", "dog"] * (len(PICTURES) // 2)
    made = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    made.save_to_disk(tmp_path / "set")
    samples = loaded(tmp_path / "set", image="image")
    assert list(samples.labels) == labels
    for image, picture in zip(samples.inputs, PICTURES, strict=True):
        assert isinstance(image, bytes)
        assert opened(image).tobytes() == opened(picture).tobytes()
