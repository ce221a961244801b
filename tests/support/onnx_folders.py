"""Tiny models as ONNX folders, whose embeddings are easily computed by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

__all__ = ["DIMENSION", "PROCESSOR", "SIDE", "TABLE", "WEIGHT", "WORDS", "images", "save", "tensor", "texts"]

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
