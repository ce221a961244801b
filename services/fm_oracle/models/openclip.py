"""CLIP models of the library open_clip (MIT): images, and a text tower for vectors of classes.

The licence of the weights is that of whoever published them.
"""

from pathlib import Path
from typing import Any, Self

from fm_oracle.models.base import Card, digest_of, version_of
from fm_oracle.models.encoders import ImageEncoder
from fm_oracle.models.library import import_library, loading
from fm_oracle.models.preprocessing import from_open_clip
from veilfed.errors import Code, VeilfedError

__all__ = ["OpenClip"]

DEFAULT_WEIGHTS = "openai"  # those of the paper that introduced CLIP, where the architecture has them


class OpenClip(ImageEncoder):
    """Encoded images -> the projected embedding, not normalised.

    Names: `ViT-B-32` (weights `openai`), `ViT-B-32:TAG` (weights that open_clip knows, fetched from its hub once),
    `ViT-B-32:FILE` (a checkpoint), or a FOLDER with open_clip_config.json and weights.
    """

    named = True

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        open_clip = import_library("open_clip")
        architecture, weights, shown = _parts(open_clip, name)
        shown = f"open_clip:{shown}"
        with loading(f"open_clip:{name}"):
            quick = _quick_gelu(open_clip, architecture, weights)
            module = open_clip.create_model(
                architecture, pretrained=weights, force_quick_gelu=quick, require_pretrained=True
            )
            tokenizer = open_clip.get_tokenizer(architecture)
            configuration = {**open_clip.get_model_config(architecture), "quick_gelu": quick}
        module.float().eval().requires_grad_(requires_grad=False)
        preprocessing = from_open_clip(module.visual.preprocess_cfg, shown)
        parameters = {"model": "open_clip", "configuration": configuration, "pixels": preprocessing.parameters}
        version = version_of([digest_of(module.state_dict())], parameters)
        blocks = len(getattr(getattr(module.visual, "transformer", None), "resblocks", ()))
        card = Card(shown, version, "image", 0, blocks, 0, 0)
        return cls(card, preprocessing, module.encode_image, lambda texts: module.encode_text(tokenizer(list(texts))))


def _parts(open_clip: Any, name: str) -> tuple[str, str | None, str]:
    """(architecture, weights, the name on the card, which shows no path). Raises VeilfedError(INPUT_INVALID)."""
    if Path(name).is_dir():
        return f"local-dir:{name}", None, Path(name).name
    architecture, _, weights = name.partition(":")
    if architecture not in open_clip.list_models():
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"open_clip has no model {architecture!r}, and there is no such folder",
            "List its models with python -c 'import open_clip; print(open_clip.list_models())'.",
        )
    if weights and Path(weights).is_file():
        return architecture, weights, architecture
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    weights = weights or DEFAULT_WEIGHTS
    if weights not in tags:
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"open_clip has no weights {weights!r} for {architecture}, and there is no such file",
            f"Say open_clip:{architecture}:WEIGHTS, a file or one of {', '.join(tags) or 'none'}.",
        )
    return architecture, weights, f"{architecture}:{weights}"


def _quick_gelu(open_clip: Any, architecture: str, weights: str | None) -> bool:
    """Whether the activation is the approximation by a sigmoid.

    open_clip itself warns and computes wrong embeddings when weights that were trained with it, as OpenAI's, are put
    into an architecture without.
    """
    asked = bool(open_clip.get_model_config(architecture).get("quick_gelu", False))
    known = open_clip.get_pretrained_cfg(architecture, weights) if weights else {}
    return asked or bool(known.get("quick_gelu", False))
