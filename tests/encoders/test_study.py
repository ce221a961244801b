"""The study of whoever has the paper's sets: folders of images and a model of open_clip, here tiny and random."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.encoders.test_open_clip import CONFIG, PREPROCESS, write
from tests.support.models import png
from tests.support.processes import veilfed

pytestmark = pytest.mark.encoders

DOMAINS, CLASSES = ("art", "photo", "sketch"), ("dark", "light")


def images(root: Path) -> Path:
    """Eight of each class in each domain."""
    rng = np.random.default_rng(1)
    for domain in DOMAINS:
        for shade, label in zip((60, 190), CLASSES, strict=True):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = np.clip(rng.normal(shade, 30, (32, 32, 3)), 0, 255).astype(np.uint8)
                (folder / f"{number}.png").write_bytes(png(pixels))
    return root


def test_a_study_with_a_model_of_open_clip(tmp_path: Path) -> None:
    model = write(tmp_path / "tiny", CONFIG, PREPROCESS["clip"])
    words: list[str | Path] = [
        "--data",
        images(tmp_path / "Shades"),
        "--fm",
        f"open_clip:{model}",
        "--cache",
        tmp_path / "cache",
    ]
    more: list[str | Path] = [
        "--methods",
        "zero-shot,averaging,fedot-b-text",
        "--seeds",
        "50",
        "--out",
        tmp_path / "out",
    ]
    done = subprocess.run(
        veilfed("study", "fedot", *words, *more), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "shades-open-clip-tiny" / "study.json").read_text())
    assert (found["model"], found["dimension"]) == ("open_clip:tiny", 16)
    assert found["domains"] == dict.fromkeys(DOMAINS, 16)
    assert found["methods"]["averaging"]["C"]["mean"] > 0.6
    # The vectors of the text tower are classifiers, if no good ones.
    assert found["methods"]["zero-shot"]["matrix"] != found["methods"]["averaging"]["matrix"]
    assert found["methods"]["zero-shot"]["settings"]["rounds"] == 0
