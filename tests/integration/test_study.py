"""`veilfed study` as its users run it, on a folder of small images."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.processes import Process, until, veilfed
from veilfed.errors import Code

DOMAINS = ("Real World", "clipart", "sketch")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains of two classes, dark and light; eight images of each."""
    root = tmp_path_factory.mktemp("data") / "Shades"
    rng = np.random.default_rng(1)
    for domain in DOMAINS:
        for label, shade in (("dark", 60), ("light", 190)):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = np.clip(rng.normal(shade, 30, (28, 28, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def arguments(images: Path, out: Path, *more: str | Path) -> list[str | Path]:
    cache = images.parent / "cache"
    return ["study", "fedot", "--data", images, "--fm", "vit", "--cache", cache, "--out", out, *more]


def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(veilfed(*words), capture_output=True, text=True, timeout=200, check=False)


def test_a_study_that_is_killed_goes_on_where_it_was(images: Path, tmp_path: Path) -> None:
    words = arguments(images, tmp_path / "out", "--methods", "averaging,fedot-b", "--seeds", "50")
    cells = tmp_path / "out" / "cells"
    process = Process(veilfed(*words), tmp_path / "log")
    try:
        until(lambda: cells.is_dir() and any(cells.glob("[a-z]*.json")), 100, "a finished cell")
    finally:
        process.kill()
    first = {path.name: path.stat().st_mtime_ns for path in cells.glob("[a-z]*.json")}
    done = call(*words, "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    assert "FEDOT(+B)" in done.stdout
    assert first.items() <= {path.name: path.stat().st_mtime_ns for path in cells.glob("[a-z]*.json")}.items()
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["domains"] == {"real-world": 16, "clipart": 16, "sketch": 16}
    assert found["methods"]["averaging"]["C"]["mean"] > 0.9
    for name in ("accuracy.svg", "conflict.png", "matrix-fedot-b.svg"):
        assert (tmp_path / "out" / "plots" / name).stat().st_size > 1000
    assert (tmp_path / "out" / "tables" / "figures.tex").exists()


def test_an_unknown_method_is_refused_before_anything_is_embedded(images: Path, tmp_path: Path) -> None:
    done = call(*arguments(images, tmp_path / "out", "--methods", "fedprox"))
    assert done.returncode == Code.INPUT_INVALID.exit_code, done.stderr
    assert "there is no method 'fedprox'" in done.stderr
    assert "Methods: all, zero-shot, averaging" in done.stderr
    assert not (tmp_path / "out").exists()
