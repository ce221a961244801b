"""Models by family and name; ONNX folders, run by ONNX Runtime. Those of other libraries: tests/encoders."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from fm_oracle.models import registry
from fm_oracle.models.library import import_library
from tests.support.models import png, published
from tests.support.onnx_folders import DIMENSION, PROCESSOR, SIDE, TABLE, WEIGHT, WORDS, images, save, tensor, texts
from veilfed.errors import Code, VeilfedError

RNG = np.random.default_rng(1)


def test_images_of_an_onnx_folder(tmp_path: Path) -> None:
    model = registry.load(f"onnx:{images(tmp_path / 'tiny')}", tmp_path)
    card = model.card
    assert (card.name, card.modality, card.dimension, card.image_size) == ("onnx:tiny", "image", DIMENSION, SIDE)
    pixels = RNG.integers(0, 256, (40, SIDE, SIDE, 3), np.uint8)
    scaled = (pixels / 255 - 0.5) / np.array([0.5, 0.25, 0.5])
    expected = scaled.transpose(0, 3, 1, 2).reshape(40, -1) @ WEIGHT
    assert np.abs(model.embed([png(image) for image in pixels]) - expected).max() < 1e-4
    with pytest.raises(VeilfedError, match="no text tower"):
        model.embed_texts(["a"])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_texts_of_an_onnx_folder(tmp_path: Path, pooling: str) -> None:
    folder = texts(tmp_path / "tiny")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    model = registry.load(f"onnx:{folder}", tmp_path)
    assert (model.card.modality, model.card.dimension, model.card.max_tokens) == ("text", DIMENSION, 6)
    given = ["a", "b c d", "a b c d e f g h", "z h"]
    tokens = [[WORDS.index(word) if word in WORDS else 0 for word in text.split()][:6] for text in given]
    expected = [TABLE[rows].mean(0) if pooling == "mean" else TABLE[rows[0]] for rows in tokens]
    assert np.abs(model.embed(given) - np.array(expected)).max() < 1e-6
    assert np.array_equal(model.embed_texts(given), model.embed(given))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 512),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, 512),
        ({"tokenizer_config.json": {"model_max_length": 10**30}, "config.json": {"max_position_embeddings": 40}}, 40),
        ({"config.json": {"max_position_embeddings": 40}, "sentence_bert_config.json": {"max_seq_length": 30}}, 30),
        ({"config.json": {"max_position_embeddings": 100_000}}, 8192),
    ],
)
def test_the_smallest_limit_of_tokens_holds(tmp_path: Path, files: dict[str, dict[str, int]], expected: int) -> None:
    folder = texts(tmp_path / "tiny")
    (folder / "tokenizer_config.json").unlink()
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document))
    assert registry.load(f"onnx:{folder}", tmp_path).card.max_tokens == expected


def test_no_input_gives_no_rows(tmp_path: Path) -> None:
    assert registry.load(f"onnx:{texts(tmp_path / 'tiny')}", tmp_path).embed([]).shape == (0, DIMENSION)


def test_the_version_follows_every_file_that_matters(tmp_path: Path) -> None:
    folder = texts(tmp_path / "tiny")

    def version() -> str:
        return registry.load(f"onnx:{folder}", tmp_path).card.version

    seen = [version()]
    (folder / "notes.md").write_text("say nothing")
    assert version() == seen[0]
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 5}))
    seen.append(version())
    (folder / "model.onnx_data").write_bytes(b"weights that are apart")
    seen.append(version())
    assert len(set(seen)) == 3


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def written(name: str, document: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(document))

    return write


BAD: dict[str, tuple[Callable[[Path], object], Code, str]] = {
    "no model": (without("model.onnx"), Code.MODEL_MISSING, "no model.onnx"),
    "broken model": (written("model.onnx", "nothing"), Code.MODEL_MISSING, "cannot be loaded"),
    "no tokenizer": (without("tokenizer.json"), Code.MODEL_MISSING, "tokenizer.json"),
    "broken tokenizer": (written("tokenizer.json", {}), Code.STATE_CORRUPT, "tokenizer.json"),
    "broken configuration": (written("tokenizer_config.json", []), Code.STATE_CORRUPT, "not a JSON object"),
    "images for a text model": (written("preprocessor_config.json", PROCESSOR), Code.INPUT_INVALID, "input_ids"),
    "pooling": (written("1_Pooling/config.json", {"pooling_mode_max_tokens": True}), Code.INPUT_INVALID, "max"),
    "a further step": (
        written("modules.json", [{"type": "sentence_transformers.models.Dense"}]),
        Code.INPUT_INVALID,
        "models.Dense",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_cannot_be_served(tmp_path: Path, name: str) -> None:
    spoil, code, expected = BAD[name]
    folder = texts(tmp_path / "tiny")
    spoil(folder)
    with pytest.raises(VeilfedError) as caught:
        registry.load(f"onnx:{folder}", tmp_path)
    assert caught.value.code is code
    assert expected in caught.value.message


def test_outputs_and_inputs_of_other_shapes_are_refused(tmp_path: Path) -> None:
    folder = texts(tmp_path / "tiny")
    flat = helper.make_node("Cast", ["input_ids"], ["flat"], to=TensorProto.FLOAT)
    outputs = [tensor("flat", TensorProto.FLOAT, "n")]
    save(folder, [flat], [tensor("input_ids", TensorProto.INT64, "n")], outputs)
    with pytest.raises(VeilfedError, match=r"without an output of the shape \[n, d\]"):
        registry.load(f"onnx:{folder}", tmp_path)
    outputs = [tensor("flat", TensorProto.FLOAT, "n", "t")]
    nodes = [helper.make_node("Cast", ["words"], ["flat"], to=TensorProto.FLOAT)]
    save(folder, nodes, [tensor("words", TensorProto.INT64, "n", "t")], outputs)
    with pytest.raises(VeilfedError, match="with the inputs words"):
        registry.load(f"onnx:{folder}", tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("onnx", "onnx:NAME"),
        ("onnx:", "onnx:NAME"),
        ("minilm:large", "'large' says nothing"),
        ("nothing:x", "no model"),
    ],
)
def test_a_family_needs_a_name_and_a_model_has_none(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(VeilfedError, match=expected) as caught:
        registry.load(name, tmp_path)
    assert caught.value.code is Code.INPUT_INVALID


def test_a_library_that_is_not_installed_names_the_extra() -> None:
    with pytest.raises(VeilfedError, match="veilfed_has_no_such_library") as caught:
        import_library("veilfed_has_no_such_library")
    assert caught.value.code is Code.PACKAGE_MISSING
    assert "veilfed[encoders]" in (caught.value.hint or "")


def test_classes_of_a_text_model_are_texts() -> None:
    model = registry.load("minilm", published("minilm"))
    prompts = ["a positive review", "a negative review"]
    assert np.array_equal(model.embed_texts(prompts), model.embed(prompts))
