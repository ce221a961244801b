"""Image models of the library timm (Apache-2.0). The licence of the weights is that of whoever published them."""

from pathlib import Path
from typing import Self

from fm_oracle.models.base import Card, digest_of, version_of
from fm_oracle.models.encoders import ImageEncoder
from fm_oracle.models.library import import_library, loading
from fm_oracle.models.preprocessing import from_timm
from veilfed.errors import Code, VeilfedError

__all__ = ["TimmVision"]


class TimmVision(ImageEncoder):
    """Encoded images -> the features before the classifier, pooled as the model does, not normalised.

    Names: `vit_base_patch16_224.augreg_in1k` and the like (weights from timm's hub, fetched once), or `NAME:FILE` with
    a checkpoint of the architecture NAME.
    """

    named = True

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        timm = import_library("timm")
        architecture, _, file = name.partition(":")
        shown = f"timm:{architecture}"
        if not timm.is_model(architecture):
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"timm has no model {architecture!r}",
                "List its models with python -c 'import timm; print(timm.list_models(pretrained=True))'.",
            )
        if file and not Path(file).is_file():
            raise VeilfedError(Code.MODEL_MISSING, f"timm:{name}: there is no such file", "Check the path.")
        with loading(f"timm:{name}"):
            overlay = {"file": file, "hf_hub_id": None, "url": None} if file else None
            # Created with its classifier: without one, timm takes a checkpoint that fits in part for a whole one.
            module = timm.create_model(architecture, pretrained=True, pretrained_cfg_overlay=overlay)
            module.reset_classifier(0)
            configuration = import_library("timm.data").resolve_model_data_config(module)
        module.float().eval().requires_grad_(requires_grad=False)
        preprocessing = from_timm(configuration, shown)
        parameters = {"model": shown.partition(".")[0], "pixels": preprocessing.parameters}
        version = version_of([digest_of(module.state_dict())], parameters)
        blocks = getattr(module, "blocks", ())
        count = len(blocks) if hasattr(blocks, "__len__") else 0
        return cls(Card(shown, version, "image", 0, count, 0, 0), preprocessing, module)
