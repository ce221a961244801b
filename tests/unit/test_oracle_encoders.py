"""Models by family and name; ONNX folders, run by ONNX Runtime. Those of other libraries: tests/encoders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

from fm_oracle.models import registry
from fm_oracle.models.library import import_library
from tests.support.models import png, published
from veilfed.errors import Code, VeilfedError

SIDE, DIMENSION = 4, 3
WORDS = ["[UNK]", *"abcdefgh"]
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((3 * SIDE * SIDE, DIMENSION)).astype(np.float32)
TABLE = RNG.standard_normal((len(WORDS), DIMENSION)).astype(np.float32)
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "resample": 0,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.25, 0.5],
}


def tensor(name: str, kind: int, *shape: str | int) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


def save(folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **constants: Any) -> None:
    folder.mkdir(exist_ok=True)
    made = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, made)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx"
    )


def images(folder: Path) -> Path:
    """The embedding is a product of all pixels with a matrix; a `pooler_output` of zeros comes first."""
    nodes = [
        helper.make_node("Flatten", ["pixel_values"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["image_embeds"]),
        helper.make_node("Sub", ["image_embeds", "image_embeds"], ["pooler_output"]),
    ]
    outputs = [tensor(name, TensorProto.FLOAT, "n", DIMENSION) for name in ("pooler_output", "image_embeds")]
    save(folder, nodes, [tensor("pixel_values", TensorProto.FLOAT, "n", 3, SIDE, SIDE)], outputs, weight=WEIGHT)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def texts(folder: Path) -> Path:
    """The states are rows of a table, times the mask."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["cast"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["cast", "axis"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["last_hidden_state"]),
    ]
    inputs = [tensor(name, TensorProto.INT64, "n", "t") for name in ("input_ids", "attention_mask")]
    outputs = [tensor("last_hidden_state", TensorProto.FLOAT, "n", "t", DIMENSION)]
    save(folder, nodes, inputs, outputs, table=TABLE, axis=np.array([2], np.int64))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 6}))
    return folder


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
    assert caught.value.code is Code.CONFIG_INVALID


def test_a_library_that_is_not_installed_names_the_extra() -> None:
    with pytest.raises(VeilfedError, match="veilfed_has_no_such_library") as caught:
        import_library("veilfed_has_no_such_library")
    assert caught.value.code is Code.PACKAGE_MISSING
    assert "veilfed[encoders]" in (caught.value.hint or "")


def test_classes_of_a_text_model_are_texts() -> None:
    model = registry.load("minilm", published("minilm"))
    prompts = ["a positive review", "a negative review"]
    assert np.array_equal(model.embed_texts(prompts), model.embed(prompts))
