"""`veilfed oracle distill`: from a real model and real examples to a student that the engine can compute."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fm_oracle.distill.export import PARAMETERS, layout, model_of, plain_streams
from fm_oracle.distill.package import StudentPackage
from fm_oracle.distill.teacher import Batch, teacher_of
from fm_oracle.encrypted.plan import Planner, Shape
from fm_oracle.models import registry
from tests.support.models import png, published
from tests.support.processes import Process, until, veilfed
from veilfed.cli.main import build
from veilfed.errors import Code, VeilfedError

TEXTS, TOKENS = 60, 12


def run(*arguments: str | Path) -> Any:
    """What a command prints with --json; raises what it raises."""
    done = CliRunner().invoke(build(), [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of VADER's texts."""
    folder = tmp_path_factory.mktemp("texts")
    whole = folder / "vader.csv"
    exported = run("data", "export", "vader", whole)
    with whole.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert exported["examples"] == len(rows) > 10_000
    assert {row["label"] for row in rows} == {"negative", "positive"}
    assert {row["domain"] for row in rows} == {"tweets", "amazon", "movies", "nyt"}
    small = folder / "small.csv"
    with small.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows[:: len(rows) // TEXTS])
    return small


def distill(texts: Path, out: Path, epochs: int = 2) -> list[str | Path]:
    options = ["--blocks", "1", "--tokens", str(TOKENS), "--epochs", str(epochs)]
    return ["oracle", "distill", "--fm", "minilm", "--data", texts, "--out", out, *options]


@pytest.fixture(scope="module")
def made(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("student") / "student.safetensors"
    return out, run(*distill(texts, out))


def test_a_student_is_made_and_says_how_good_it_is(made: tuple[Path, Any]) -> None:
    out, document = made
    assert document["train"] + document["test"] >= TEXTS
    assert {"teacher_accuracy", "student_accuracy", "agreement"} <= document.keys()
    assert document["arithmetic_error"] < 0.02
    assert document["shape"]["blocks"] == len(document["ranges"]) == 1
    assert not out.with_name(out.name + ".part").exists()
    student = StudentPackage.load(out)
    assert student.figures.test == document["test"]
    assert student.teacher_version == registry.load("minilm", published("minilm")).card.version


def test_a_study_of_blindfed_runs_on_its_block_outputs(made: tuple[Path, Any], texts: Path, tmp_path: Path) -> None:
    document, page = tmp_path / "blind.json", tmp_path / "page.md"
    command = ["study", "blind", "--student", f"small={made[0]}", "--data", texts, "--out", tmp_path / "results"]
    command += ["--seeds", "50", "--clients", "3", "--alphas", "100", "--ranks", "4", "--rounds", "3", "--rows", "40"]

    def studied() -> Any:
        arguments = [*map(str, command), "--json", str(document), "--page", str(page)]
        assert CliRunner().invoke(build(), arguments, catch_exceptions=False).exit_code == 0
        return json.loads(document.read_text())

    found = studied()
    (student,) = found["students"]
    assert sum(found["rows"].values()) == 40
    assert (student["blocks"], student["dimension"], student["tokens"]) == (1, 384, TOKENS)
    assert {row["name"] for row in student["rows"]} >= {"adapters-fixed", "probe", "probe-table", "probe-teacher"}
    assert "## small" in page.read_text()
    (kept,) = (tmp_path / "results" / "streams").iterdir()
    with np.load(kept) as arrays:
        model, student_file = registry.load("minilm", published("minilm")), StudentPackage.load(made[0])
        teacher = teacher_of(model, TOKENS, 98)
        inputs = list(csv.DictReader(texts.open(newline="")))
        drawn = np.sort(np.random.default_rng(0).permutation(len(inputs))[:40])
        chosen = [inputs[row]["text"] for row in drawn[:3]]
        batch = teacher.batch(teacher.prepare(chosen))
        (stream,) = plain_streams(student_file, batch)
        count = int(batch.mask.sum())
        np.testing.assert_allclose(arrays["streams"][:count, 0], stream[batch.mask.numpy() > 0], atol=1e-4)
        np.testing.assert_allclose(arrays["teacher"][:3], model.embed(chosen), atol=1e-4)
    kept_before = kept.stat().st_mtime_ns
    assert studied() == found, "what was finished is read from its files"
    assert kept.stat().st_mtime_ns == kept_before
    kept.write_bytes(b"no arrays")
    with pytest.raises(VeilfedError, match="not block outputs") as refused:
        studied()
    assert refused.value.code is Code.STATE_CORRUPT


def test_the_engine_s_arithmetic_is_near_and_its_plan_exists(made: tuple[Path, Any]) -> None:
    student = StudentPackage.load(made[0])
    teacher = teacher_of(registry.load("minilm", published("minilm")), TOKENS, 98)
    prepared = teacher.prepare(["A short one.", "And one that is quite a bit longer than the other one."])
    batch = teacher.batch(prepared)
    (stream,) = plain_streams(student, batch)
    assert stream.shape == (2, batch.mask.shape[1], 384)
    assert not stream[batch.mask.numpy() == 0].any()
    # What is computed for a text does not depend on the others, nor on the padding beside it.
    alone = plain_streams(student, Batch(batch.features[:1, : len(prepared[0])], batch.mask[:1, : len(prepared[0])]))
    assert np.allclose(alone[0], stream[:1, : len(prepared[0])], atol=1e-9)
    planner, limbs = Planner(PARAMETERS), PARAMETERS.limbs
    stream_shape, mask = (Shape(count, PARAMETERS.scale, limbs) for count in (384, 1))
    model = model_of(student, layout(TOKENS, PARAMETERS.slots))
    (end,) = model(stream_shape, mask, Shape(1, 2.0**24, limbs), planner)
    assert (len(end), end.components) == (384, 2)


def test_killed_and_started_again_it_makes_the_same_student(texts: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    run(*distill(texts, whole, epochs=4))
    kept = cut.with_name(cut.name + ".part")
    process = Process(veilfed(*distill(texts, cut, epochs=4)), tmp_path / "log")
    until(kept.exists, 200, "an epoch is done", interval=0.01)
    process.kill()
    assert not cut.exists()
    with pytest.raises(VeilfedError, match="other options") as caught:
        run(*distill(texts, cut, epochs=6))
    assert caught.value.code is Code.STATE_CORRUPT
    run(*distill(texts, cut, epochs=4))
    assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text,label\na,x\nb,x\n", "of 1 classes; two are needed"),
        ("words,label\na,x\n", "needs the columns 'text' and 'label'"),
        ("text,label\na,x\n,y\n", "row 2 has no text or no label"),
        ("text,label\na,x\nb,y\n", "too few examples for training and a test"),
    ],
)
def test_examples_that_are_refused(content: str, words: str, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text(content)
    with pytest.raises(VeilfedError, match=words) as caught:
        run("oracle", "distill", "--fm", "minilm", "--data", data, "--out", tmp_path / "student")
    assert caught.value.code is Code.DATA_INVALID
    assert not (tmp_path / "student").exists()


def test_what_is_no_student_is_refused(made: tuple[Path, Any], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(made[0].read_bytes()[:-100])
    with pytest.raises(VeilfedError, match="not a student") as caught:
        StudentPackage.load(damaged)
    assert caught.value.code is Code.STATE_CORRUPT


def test_a_student_of_images_has_its_embedding_in_the_engine(tmp_path: Path) -> None:
    few, random = tmp_path / "few", np.random.default_rng(0)
    for number in range(40):
        path = few / ("dark", "light")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(random.integers(0, 128, (28, 28, 3), dtype=np.uint8) + np.uint8(127 * (number % 2))))
    out = tmp_path / "student"
    options = ["--blocks", "1", "--image-side", "28", "--epochs", "2"]
    document = run("oracle", "distill", "--fm", "vit", "--data", few, "--out", out, *options)
    assert document["shape"]["tokens"] == 5
    student = StudentPackage.load(out)
    assert student.embedding is not None
    assert student.embedding.shape == (384, 588 + 5)
    teacher = teacher_of(registry.load("vit", published("vit")), 64, 28)
    batch = teacher.batch(teacher.prepare([path.read_bytes() for path in sorted(few.rglob("*.png"))[:2]]))
    (stream,) = plain_streams(student, batch)
    assert stream.shape == (2, 5, 384)
    assert torch.isfinite(torch.from_numpy(stream)).all()
