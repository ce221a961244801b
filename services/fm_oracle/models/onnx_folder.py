"""Models as ONNX files, run by ONNX Runtime (MIT): a folder as Optimum exports it.

model.onnx (and model.onnx_data, where the weights are apart) with preprocessor_config.json for images, or with
tokenizer.json for text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fm_oracle.models.base import Card, Model, version_of
from fm_oracle.models.encoders import ImageEncoder, TextEncoder, read_text_folder
from fm_oracle.models.library import digests, import_library, loading, read_json
from fm_oracle.models.preprocessing import from_huggingface, unsupported
from veilfed.errors import Code, VeilfedError
from veilfed.packages import PackageFile

__all__ = ["OnnxFolder"]

# What decides the embeddings.
FILES = ("model.onnx*", "*.json", "1_Pooling/config.json")
TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}


class OnnxFolder:
    """The name is the folder. With a preprocessor_config.json it embeds images, else text.

    The embedding is the first output of the shape [n, d] (`pooler_output` is passed over: few models mean it to be
    used); else, of the first output [n, t, d], the class token for images, and for text what 1_Pooling says or the
    mean over the tokens. Not normalised.
    """

    files: Sequence[PackageFile] = ()
    named = True

    @staticmethod
    def load(folder: Path, name: str) -> Model[Any]:
        path, shown = Path(name), f"onnx:{Path(name).name}"
        runtime = import_library("onnxruntime")
        if not (path / "model.onnx").is_file():
            raise VeilfedError(
                Code.MODEL_MISSING, f"{path}: there is no model.onnx in this folder", "Check the model's folder."
            )
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        with loading(shown):
            session = runtime.InferenceSession(str(path / "model.onnx"), options, providers=["CPUExecutionProvider"])
        output = _output(session, shown)
        inputs = [value.name for value in session.get_inputs()]
        version = version_of(digests(path, FILES), {"model": "onnx", "output": output})
        processor = path / "preprocessor_config.json"
        card = Card(shown, version, "image" if processor.is_file() else "text", 0, 0, 0, 0)

        def run(feed: Mapping[str, Any]) -> Tensor:
            return torch.from_numpy(np.asarray(session.run([output], feed)[0]))

        if processor.is_file():
            if len(inputs) != 1:
                raise unsupported(shown, f"a model with the inputs {', '.join(inputs)}")
            return ImageEncoder(
                card,
                from_huggingface(read_json(processor), shown),
                lambda pixels: _first_token(run({inputs[0]: pixels.numpy()})),
            )
        if "input_ids" not in inputs or not set(inputs) <= TEXT_INPUTS:
            raise unsupported(shown, f"a model of text with the inputs {', '.join(inputs)}")
        return TextEncoder(card, read_text_folder(path), lambda tokens, mask: run(_feed(inputs, tokens, mask)))


def _output(session: Any, shown: str) -> str:
    """The name of the output that is the embedding. Raises VeilfedError(INPUT_INVALID)."""
    outputs = {value.name: len(value.shape) for value in session.get_outputs() if value.name != "pooler_output"}
    for rank in (2, 3):
        for name, found in outputs.items():
            if found == rank:
                return str(name)
    raise unsupported(shown, "a model without an output of the shape [n, d] or [n, t, d]")


def _first_token(output: Tensor) -> Tensor:
    return output[:, 0] if output.ndim == 3 else output


def _feed(inputs: Sequence[str], tokens: Tensor, mask: Tensor | None) -> dict[str, Any]:
    whole = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens) if mask is None else mask.long(),
        "token_type_ids": torch.zeros_like(tokens),
    }
    return {name: whole[name].numpy() for name in inputs}
