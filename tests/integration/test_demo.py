"""`veilfed demo` as a newcomer runs it, on the smallest task."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import veilfed
from veilfed.errors import Code

HOSPITALS = ["cleveland", "hungary", "switzerland", "va-long-beach"]


def test_the_demo_prints_its_figures_and_leaves_nothing_running(tmp_path: Path) -> None:
    figures, folder = tmp_path / "figures.json", tmp_path / "work"
    command = veilfed(
        "demo", "--task", "heart", "--rounds", "2", "--seeds", "50", "--json", figures, "--folder", folder
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert (found["task"], found["seeds"], found["rounds"]) == ("heart", [50], 2)
    assert found["institutions"] == HOSPITALS
    cells = [value for row in found["matrix"] for value in row]
    assert len(cells) == 16
    assert all(0 <= value <= 1 for value in cells)
    assert found["C"] == pytest.approx(sum(cells) / 16)
    for prefix in ("", "baseline_"):
        assert found[f"{prefix}C"] == pytest.approx((found[f"{prefix}G"] + 3 * found[f"{prefix}P"]) / 4)
    assert found["ledger_ok"] is True
    assert sorted(found["bytes_out_per_client"]) == HOSPITALS
    assert all(counts["aggregator"] > 0 and counts["oracle"] > 0 for counts in found["bytes_out_per_client"].values())
    assert found["seconds"] > 0
    for words in ("FEDOT(+B)", "baseline", "Accuracy by round", "Bytes out", "sealed model minilm"):
        assert words in done.stdout

    for name in HOSPITALS:
        ledger = folder / "institutions" / name / "agent" / "state" / "ledger.jsonl"
        bundle = folder / "institutions" / name / "agent" / "identity" / "bundle.pem"
        checked = subprocess.run(
            veilfed("ledger", "verify", "--bundle", bundle, ledger), capture_output=True, check=False
        )
        assert checked.returncode == 0
    assert str(folder) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "arguments",
    [["--task", "unknown"], ["--seeds", "50,50"], ["--seeds", "x"], ["--seeds", ""], ["--seeds", "-1"]],
)
def test_a_wrong_call_is_refused_at_once(arguments: list[str]) -> None:
    done = subprocess.run(veilfed("demo", *arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Code.INPUT_INVALID.exit_code
    assert "hint: " in done.stderr


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = subprocess.run(
        veilfed("demo", "--task", "heart", "--folder", tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == Code.FILE_UNUSABLE.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
