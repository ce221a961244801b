"""What an institution prepares with the owner's published file is what the owner's student was distilled on."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from client_agent.encrypted.inputs import load_inputs
from fm_oracle.distill.inputs import published_inputs
from fm_oracle.distill.teacher import teacher_of
from fm_oracle.models import registry
from veilfed.errors import Code, VeilfedError
from veilfed.packages import default_folder

TEXTS = ["short", "a text that has more tokens than the student takes, and so is cut before its end", "héllo 123!"]


def drawn(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (120, 150, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize(
    ("name", "inputs", "modality", "indicators"),
    [("minilm", TEXTS, "text", 0), ("vit", [drawn(1), drawn(2)], "image", 50)],
)
def test_both_parties_prepare_the_same(
    tmp_path: Path, name: str, inputs: list[Any], modality: str, indicators: int
) -> None:
    teacher = teacher_of(registry.load(name, default_folder()), 12, 98)
    (tmp_path / "inputs").write_bytes(published_inputs(teacher))
    ours = load_inputs(tmp_path / "inputs")
    assert (ours.modality, ours.indicators) == (modality, indicators)
    batch = teacher.batch(teacher.prepare(inputs))
    for found, features, mask in zip(ours.features(inputs), batch.features, batch.mask, strict=True):
        expected = features[mask > 0].numpy()
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 1e-5


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inputs").write_bytes(b"something else")
    with pytest.raises(VeilfedError, match="not the file of inputs") as caught:
        load_inputs(tmp_path / "inputs")
    assert caught.value.code is Code.STATE_CORRUPT
    with pytest.raises(VeilfedError) as caught:
        load_inputs(tmp_path / "none")
    assert caught.value.code is Code.FILE_UNUSABLE
