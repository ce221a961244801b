"""`veilfed study` as its users run it, on a folder of small images."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from client_agent.cache import HEADER_BYTES
from tests.support.processes import Process, until, veilfed
from tests.unit.test_data_femnist import write, writer
from veilfed.demo.federation import Federation
from veilfed.demo.run import run_jobs
from veilfed.demo.study import Cell, round_accuracies
from veilfed.demo.tasks import HEART
from veilfed.demo.workspace import Workspace
from veilfed.errors import Code
from veilfed.packages import default_folder
from veilfed_study.methods import METHODS
from veilfed_study.subjects import of_folder

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


def arguments(images: Path, out: Path, *more: str | Path, command: str = "fedot") -> list[str | Path]:
    cache = images.parent / "cache"
    return ["study", command, "--data", images, "--fm", "vit", "--cache", cache, "--out", out, *more]


def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(veilfed(*words), capture_output=True, text=True, timeout=800, check=False)


def test_a_study_that_is_killed_goes_on_where_it_was(images: Path, tmp_path: Path) -> None:
    words = arguments(images, tmp_path / "out", "--methods", "averaging,fedot-b", "--seeds", "50")
    out = tmp_path / "out" / "shades-vit"
    cells = out / "cells"
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
        assert (out / "plots" / name).stat().st_size > 1000
    assert (out / "tables" / "figures.tex").exists()


def test_an_unknown_method_is_refused_before_anything_is_embedded(images: Path, tmp_path: Path) -> None:
    done = call(*arguments(images, tmp_path / "out", "--methods", "fedprox"))
    assert done.returncode == Code.INPUT_INVALID.exit_code, done.stderr
    assert "there is no method 'fedprox'" in done.stderr
    assert "Methods: all, zero-shot, averaging" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_ten_digits_of_femnist(images: Path, tmp_path: Path) -> None:
    users = {f"writer{number}": writer(number, [0, 9, 10, 61]) for number in range(6)}
    root = write(tmp_path / "all_data", [users])
    cache = images.parent / "cache"
    subject = of_folder(root, "vit", default_folder(), cache, set_name="femnist", institutions=2, characters="digits")
    assert subject.classes == tuple("0123456789")
    assert {name: domain.labels.tolist() for name, domain in subject.domains.items()} == {
        "writers-1": [0, 9] * 3,
        "writers-2": [0, 9] * 3,
    }


def test_a_sweep_chooses_settings_that_a_study_then_has(images: Path, tmp_path: Path) -> None:
    """In a folder that is called like a task, which it is not."""
    folder = images.parent / "heart"
    shutil.copytree(images, folder)
    words = ["--methods", "averaging,fedot-b", "--blocks", "8", "--rounds", "1,2", "--folds", "2"]
    rates = ["--classifier-rates", "0.01", "--other-rates", "0.001,0.002"]
    done = call(*arguments(folder, tmp_path, *words, *rates, command="sweep"))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "heart-vit"
    settings = yaml.safe_load((out / "settings.yaml").read_text())
    assert settings["split"] == 50
    assert settings["methods"]["fedot-b"]["strategy"]["blocks"] == 8
    grid = json.loads((out / "sweep.json").read_text())["methods"]
    assert {method: len(found["grid"]) for method, found in grid.items()} == {"averaging": 2, "fedot-b": 4}
    more: list[str | Path] = ["--methods", "fedot-b", "--seeds", "77,98", "--settings", out / "settings.yaml"]
    done = call(*arguments(folder, tmp_path, *more))
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "study.json").read_text())
    assert (found["task"], found["split"]) == ("heart", 50)
    used = found["methods"]["fedot-b"]["settings"]
    assert used["rounds"] == settings["methods"]["fedot-b"]["rounds"]
    assert used["transform_rate"] == settings["methods"]["fedot-b"]["strategy"]["transform_rate"]
    assert "beside" not in found


def test_many_clients(images: Path, tmp_path: Path) -> None:
    words: list[str | Path] = [
        "--methods",
        "averaging,all-local",
        "--seeds",
        "50",
        "--clients",
        "2,3",
        "--json",
        tmp_path / "found.json",
    ]
    done = call(*arguments(images, tmp_path / "out", *words, command="scale"))
    assert done.returncode == 0, done.stderr
    assert "accuracy over the number of clients" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["clients"] == [2, 3]
    local = found["methods"]["FEDOT, all local"]
    assert [row["G"]["mean"] for row in local] == [None, None]
    assert local[1]["P"]["mean"] > 0.9
    assert (tmp_path / "out" / "shades-vit" / "scale-by-domain.svg").stat().st_size > 1000


def test_one_shot_against_many_rounds(images: Path, tmp_path: Path) -> None:
    words = ["--clients", "3", "--alphas", "0.5", "--ridges", "1,gcv", "--least", "1", "--rounds", "2", "--seeds", "50"]
    words += ["--methods", "afl,fedcgs,averaging,fedot-b,fedopal", "--tunings", "0.1:2", "--rows", "20"]
    words += ["--json", str(tmp_path / "figures.json")]
    done = call(*arguments(images, tmp_path / "out", *words, command="analytic"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    names = ["afl-1.0-1", "afl-gcv-1", "fedcgs-1", "averaging", "fedot-b"]
    prompts = [f"fedopal-{ridge}-1-mu0.1-e2{end}" for end in ("", "-reextract") for ridge in ("1.0", "gcv")]
    assert [variant["name"] for variant in found["variants"]] == names + prompts
    assert found["rows"]["training"] == 20
    for variant in found["variants"]:
        (cell,) = variant["cells"]
        assert cell["accuracy"]["mean"] > 0.7
        assert cell["rounds"] == (2 if variant["name"] in names[3:] or variant["reextract"] else 1)
        assert (cell["inputs"], cell["gradients"]) == ((60, 40) if variant["tuning"] else (0, 0))
        assert variant["label"] in done.stdout
    assert (tmp_path / "out" / "shades-vit" / "tables" / "analytic-3-own.md").exists()


def test_a_benchmark_has_its_own_training_and_test_rows(images: Path, tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(2), tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, count in (("train", 12), ("test", 6)):
        rows = [[0, label, *np.clip(rng.normal(60 + 2 * label, 20, 3072), 0, 255)] for label in [0, 60] * (count // 2)]
        (folder / f"{name}.bin").write_bytes(np.array(rows).astype(np.uint8).tobytes())
    common: list[str | Path] = [
        "--data",
        folder,
        "--set",
        "cifar-100",
        "--fm",
        "vit",
        "--cache",
        images.parent / "cache",
    ]
    words = ["--clients", "2", "--alphas", "10", "--methods", "afl", "--ridges", "1", "--least", "1", "--seeds", "50"]
    done = call("study", "analytic", *common, "--out", tmp_path / "out", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "cifar-100-vit" / "analytic.json").read_text())
    assert found["rows"] == {"training": 12, "test": 6}
    assert found["variants"][0]["cells"][0]["accuracy"]["mean"] > 0.9
    done = call("study", "fedot", *common, "--out", tmp_path / "out")
    assert done.returncode == Code.INPUT_INVALID.exit_code
    assert "cifar-100 has no domains to leave out" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_report_of_a_real_task(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results.md"
    words: list[str | Path] = [
        "--tasks",
        "heart",
        "--seeds",
        "50",
        "--scale-seeds",
        "none",
        "--out",
        tmp_path / "out",
        "--page",
        page,
    ]
    done = call("study", "report", *words)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    command = "veilfed study report --tasks heart --seeds 50 --scale-seeds none --out results --page results-fedot.md"
    assert f"Written by `{command}`" in text
    found = json.loads((tmp_path / "out" / "heart-minilm" / "study.json").read_text())
    assert set(found["methods"]) == set(METHODS)
    for name in ("ridge-pooled", "ridge-alone"):
        assert f"| {found['beside'][name]['label']} |" in text
    assert f"| {100 * found['methods']['fedot-b']['C']['mean']:.1f} |" in text
    assert (page.parent / "figures" / "heart-accuracy.svg").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_of_a_real_task_has_the_models_of_the_services(tmp_path: Path) -> None:
    """Heart, the real MiniLM, four agents and their oracles; the study has the embeddings that the oracles gave."""
    workspace, held_out, rounds = Workspace(tmp_path / "services", HEART), "cleveland", 3
    federation = Federation(workspace, default_folder())
    cells = {"fedot-b": Cell(held_out, 50, "orthogonal"), "averaging": Cell(held_out, 50, "identity")}
    try:
        federation.enroll()
        federation.serve()
        jobs = run_jobs(federation, list(cells.values()), rounds)
    finally:
        federation.stop()
    rates = {"classifier_rate": HEART.classifier_rate}
    fedot = {**rates, "transform_rate": HEART.transform_rate, "blocks": HEART.blocks}
    settings = {"averaging": {"rounds": rounds, "strategy": rates}, "fedot-b": {"rounds": rounds, "strategy": fedot}}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"methods": settings}))
    words: list[str | Path] = [
        "--methods",
        "averaging,fedot-b",
        "--seeds",
        "50",
        "--settings",
        tmp_path / "settings.yaml",
    ]
    done = call(
        "study", "fedot", "--task", "heart", *words, "--cache", merged(workspace, tmp_path / "cache"), "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    for method, cell in cells.items():
        (path,) = (tmp_path / "heart-minilm" / "cells").glob(f"{method}-50-without-{held_out}-*.json")
        found = json.loads(path.read_text())["result"]
        assert found["model_sha256"] == jobs[cell].rounds[-1].model_sha256
        others = [name for name in HEART.domains if name != held_out]
        assert [(row[held_out], np.mean([row[name] for name in others])) for row in found["accuracies"]] == (
            round_accuracies(jobs[cell], held_out)
        )


def merged(workspace: Workspace, folder: Path) -> Path:
    """One cache with the records of all agents' caches."""
    folder.mkdir()
    for institution in workspace.institutions:
        (cache,) = (institution.agent_folder / "state" / "embeddings").glob("*.cache")
        target = folder / cache.name
        data = cache.read_bytes()
        target.write_bytes(target.read_bytes() + data[HEADER_BYTES:] if target.exists() else data)
    return folder
