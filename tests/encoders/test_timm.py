"""Tiny random models of timm, compared with the library's own transform and forward."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fm_oracle.models import registry
from tests.encoders.pictures import PICTURES, opened
from veilfed.errors import Code, VeilfedError

pytestmark = pytest.mark.encoders

# A transformer, a convolutional network whose last layers differ from its width, one that squashes, one on tokens.
NAMES = ["test_vit", "test_efficientnet", "test_convnext", "vit_tiny_patch16_224", "resnet18", "mobilenetv3_small_050"]


def checkpoint(tmp_path: Path, name: str) -> Path:
    import timm

    torch.manual_seed(0)
    path = tmp_path / f"{name}.pt"
    torch.save(timm.create_model(name).state_dict(), path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_gives_the_library_s_features(tmp_path: Path, name: str) -> None:
    import timm

    path = checkpoint(tmp_path, name)
    model = registry.load(f"timm:{name}:{path}", tmp_path)
    theirs = timm.create_model(name, checkpoint_path=str(path)).eval()
    config = timm.data.resolve_model_data_config(theirs)
    transform = timm.data.create_transform(**config, is_training=False)
    with torch.inference_mode():
        pixels = torch.stack([transform(opened(picture)) for picture in PICTURES])
        expected = theirs.forward_head(theirs.forward_features(pixels), pre_logits=True).numpy()
    assert model.card.name == f"timm:{name}"
    assert model.card.dimension == expected.shape[1]
    assert model.card.image_size == config["input_size"][1]
    assert np.abs(model.embed(PICTURES) - expected).max() < 1e-4 * np.abs(expected).max()


def test_blocks_are_counted_where_there_are_blocks(tmp_path: Path) -> None:
    for name, blocks in (("vit_tiny_patch16_224", 12), ("resnet18", 0)):
        assert registry.load(f"timm:{name}:{checkpoint(tmp_path, name)}", tmp_path).card.blocks == blocks


def test_the_version_follows_weights_and_preprocessing(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "test_vit")
    version = registry.load(f"timm:test_vit:{path}", tmp_path).card.version
    assert registry.load(f"timm:test_vit:{path}", tmp_path).card.version == version
    weights = torch.load(path)
    weights["head.bias"] += 1  # not used
    torch.save(weights, path)
    assert registry.load(f"timm:test_vit:{path}", tmp_path).card.version == version
    weights["patch_embed.proj.bias"] += 1
    torch.save(weights, path)
    assert registry.load(f"timm:test_vit:{path}", tmp_path).card.version != version


def test_a_checkpoint_that_fits_in_part_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "test_vit")
    weights = torch.load(path)
    del weights["patch_embed.proj.weight"]
    torch.save(weights, path)
    with pytest.raises(VeilfedError, match=r"patch_embed\.proj\.weight") as caught:
        registry.load(f"timm:test_vit:{path}", tmp_path)
    assert caught.value.code is Code.MODEL_MISSING


def test_what_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(VeilfedError, match="no model 'vit_huge'"):
        registry.load("timm:vit_huge", tmp_path)
    with pytest.raises(VeilfedError, match="no such file"):
        registry.load("timm:test_vit:/nowhere", tmp_path)
