"""Models in a local folder of the library transformers (Apache-2.0), as `save_pretrained` writes it; images or text.

Code inside a folder is never run, and nothing is fetched. The licence of the weights is their publisher's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fm_oracle.models import texts
from fm_oracle.models.base import Card, Model, version_of
from fm_oracle.models.encoders import EncodeTexts, ImageEncoder, TextEncoder, read_text_folder
from fm_oracle.models.library import digests, import_library, loading, read_json
from fm_oracle.models.preprocessing import from_huggingface
from veilfed.errors import Code, VeilfedError
from veilfed.packages import PackageFile

__all__ = ["HuggingFace"]

# What decides the embeddings.
FILES = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.model", "1_Pooling/config.json")
CLASS_TOKENS = {"cls_token", "class_embedding", "class_token"}


class HuggingFace:
    """The name is the folder. With a preprocessor_config.json it embeds images, else text.

    Images: the projected embedding of CLIP, SigLIP and their like; else the class token of the last block, or the mean
    over positions where there is none. Text: the mean over the tokens of the last block, or what sentence-transformers
    noted in 1_Pooling. Not normalised.
    """

    files: Sequence[PackageFile] = ()
    named = True

    @staticmethod
    def load(folder: Path, name: str) -> Model[Any]:
        path, shown = Path(name), f"transformers:{Path(name).name}"
        config = read_json(path / "config.json")
        processor = path / "preprocessor_config.json"
        module = _module(path, shown)
        own = getattr(module.config, "vision_config", module.config)
        blocks = getattr(own, "num_hidden_layers", 0)
        card = Card(
            name=shown,
            version=version_of(digests(path, FILES), {"model": "transformers"}),
            modality="image" if processor.is_file() else "text",
            dimension=0,
            blocks=blocks if isinstance(blocks, int) else 0,
            max_tokens=0,
            image_size=0,
        )
        if not processor.is_file():
            return TextEncoder(
                card,
                read_text_folder(path),
                lambda tokens, mask: module(input_ids=tokens, attention_mask=_mask(tokens, mask)).last_hidden_state,
            )
        tower = _text_tower(module, path) if config.get("model_type") == "clip" else None
        return ImageEncoder(card, from_huggingface(read_json(processor), shown), _image_tower(module), tower)


def _module(path: Path, shown: str) -> Any:
    """The model, in float32. Raises VeilfedError(MODEL_MISSING), also for weights that are not in the files."""
    transformers = import_library("transformers")
    with loading(shown):
        module, report = transformers.AutoModel.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    # What is missing would be random. The pooler often is, and is not used.
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key.split("."))
    if missing or report["mismatched_keys"]:
        what = missing[0] if missing else "a tensor of another shape"
        raise VeilfedError(Code.MODEL_MISSING, f"{shown}: its files do not hold all weights: {what}")
    return module.eval().requires_grad_(requires_grad=False)


def _image_tower(module: Any) -> Callable[[Tensor], Tensor]:
    if hasattr(module, "get_image_features"):
        return lambda pixels: _vectors(module.get_image_features(pixel_values=pixels))
    has_class = any(name.rsplit(".", 1)[-1] in CLASS_TOKENS for name, _ in module.named_parameters())

    def encode(pixels: Tensor) -> Tensor:
        states: Tensor = module(pixel_values=pixels).last_hidden_state
        if states.ndim == 4:  # [n, d, h, w] of a convolutional network
            return states.mean(dim=(2, 3))
        return states[:, 0] if has_class else states.mean(dim=1)

    return encode


def _text_tower(module: Any, path: Path) -> EncodeTexts | None:
    """Of CLIP; other models of images and text pad in ways of their own."""
    if not (path / "tokenizer.json").is_file():
        return None
    reader = read_text_folder(path)
    reader.tokenizer.enable_truncation(module.config.text_config.max_position_embeddings)

    def encode(given: Any) -> Tensor:
        (tokens,) = (torch.from_numpy(row)[None] for row in texts.tokenize(reader.tokenizer, given))
        return _vectors(module.get_text_features(input_ids=tokens, attention_mask=torch.ones_like(tokens)))

    return encode


def _mask(tokens: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(tokens) if mask is None else mask.long()


def _vectors(output: Any) -> Tensor:
    """[n, d]: older versions of the library give the tensor, newer ones an object with it."""
    found: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return found
