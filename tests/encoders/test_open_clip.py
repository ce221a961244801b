"""Tiny random models of open_clip, compared with the library's own transform and forward."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fm_oracle.models import registry
from tests.encoders.pictures import PICTURES, opened
from veilfed.errors import Code, VeilfedError

pytestmark = pytest.mark.encoders

CONFIG: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
TEXTS = ["a photo of a dog", "a photo of a house", "a " * 200]


def module(config: dict[str, Any]) -> Any:
    import open_clip

    torch.manual_seed(0)
    return open_clip.CLIP(**config)


def write(folder: Path, config: dict[str, Any], preprocess: dict[str, Any]) -> Path:
    folder.mkdir()
    document = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(document))
    torch.save(module(config).state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


PREPROCESS: dict[str, dict[str, Any]] = {
    "clip": {},
    "siglip": {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"},
    "bilinear": {"interpolation": "bilinear"},
}


@pytest.mark.parametrize("name", PREPROCESS)
def test_a_folder_gives_the_library_s_embeddings(tmp_path: Path, name: str) -> None:
    import open_clip

    folder = write(tmp_path / "tiny", CONFIG, PREPROCESS[name])
    model = registry.load(f"open_clip:{folder}", tmp_path)
    assert (model.card.name, model.card.dimension, model.card.image_size) == ("open_clip:tiny", 16, 32)
    assert (model.card.modality, model.card.blocks) == ("image", 2)
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    theirs.eval()
    with torch.inference_mode():
        pixels = torch.stack([transform(opened(picture)) for picture in PICTURES])
        expected = theirs.encode_image(pixels).numpy()
        texts = theirs.encode_text(open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS)).numpy()
    assert np.abs(model.embed(PICTURES) - expected).max() < 1e-5
    assert np.abs(model.embed_texts(TEXTS) - texts).max() < 1e-5


def test_the_version_follows_weights_activation_and_preprocessing(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", CONFIG, {})
    version = registry.load(f"open_clip:{folder}", tmp_path).card.version
    assert registry.load(f"open_clip:{folder}", tmp_path).card.version == version
    others = {
        "squash": write(tmp_path / "squash", CONFIG, {"resize_mode": "squash"}),
        "quick": write(tmp_path / "quick", {**CONFIG, "quick_gelu": True}, {}),
        "weights": write(tmp_path / "weights", CONFIG, {}),
    }
    weights = torch.load(folder / "open_clip_pytorch_model.bin")
    weights["visual.proj"][0, 0] += 1
    torch.save(weights, others["weights"] / "open_clip_pytorch_model.bin")
    versions = {registry.load(f"open_clip:{other}", tmp_path).card.version for other in others.values()}
    assert len({version, *versions}) == 4


def test_a_checkpoint_of_a_named_architecture(tmp_path: Path) -> None:
    import open_clip

    (tmp_path / "veilfed-tiny.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(tmp_path)
    checkpoint = tmp_path / "tiny.pt"
    torch.save(module(CONFIG).state_dict(), checkpoint)
    model = registry.load(f"open_clip:veilfed-tiny:{checkpoint}", tmp_path)
    folder = write(tmp_path / "tiny", CONFIG, {})
    assert np.array_equal(model.embed(PICTURES), registry.load(f"open_clip:{folder}", tmp_path).embed(PICTURES))
    assert model.card.name == "open_clip:veilfed-tiny"  # no path of the model's owner

    torch.save({"visual.proj": torch.zeros(2)}, checkpoint)
    with pytest.raises(VeilfedError) as caught:
        registry.load(f"open_clip:veilfed-tiny:{checkpoint}", tmp_path)
    assert caught.value.code is Code.MODEL_MISSING


def test_openai_s_weights_get_their_activation() -> None:
    """ViT-B-32 has GELU and OpenAI's weights want QuickGELU, which the library itself does not put right."""
    import open_clip

    from fm_oracle.models.openclip import _quick_gelu

    assert _quick_gelu(open_clip, "ViT-B-32", "openai") is True
    assert _quick_gelu(open_clip, "ViT-B-32-quickgelu", "openai") is True
    assert _quick_gelu(open_clip, "ViT-B-32", "laion2b_s34b_b79k") is False


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ViT-B-33", "no model 'ViT-B-33'"),
        ("ViT-B-32:mine", "no weights 'mine'"),
        ("ViT-B-16-SigLIP", "no weights 'openai'"),
    ],
)
def test_what_there_is_not_is_named(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(VeilfedError, match=expected) as caught:
        registry.load(f"open_clip:{name}", tmp_path)
    assert caught.value.code is Code.INPUT_INVALID


def test_preprocessing_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", CONFIG, {"resize_mode": "longest"})
    with pytest.raises(VeilfedError, match="resize mode 'longest'"):
        registry.load(f"open_clip:{folder}", tmp_path)


class Hub(BaseHTTPRequestHandler):
    """Has nothing, and notes what is asked for."""

    asked: ClassVar[list[str]] = []

    def _refuse(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_GET = do_HEAD = _refuse  # noqa: N815


@pytest.mark.parametrize("command", ["describe", "fetch"])
def test_only_fetch_reaches_for_the_network(tmp_path: Path, command: str) -> None:
    """In a process of its own, as the library decides when it is imported."""
    Hub.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        environment = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint}
        arguments = [sys.executable, "-m", "veilfed.cli.main", "oracle", command, "open_clip:ViT-B-32"]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=250, check=False)
        server.shutdown()
    assert done.returncode == Code.MODEL_MISSING.exit_code
    assert "veilfed oracle fetch" in done.stderr
    assert bool(Hub.asked) is (command == "fetch")
