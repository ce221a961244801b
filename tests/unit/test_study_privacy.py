"""The study of accuracy against epsilon, on small made-up domains."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.studies import made_up
from veilfed.errors import Code, VeilfedError
from veilfed.privacy import epsilon
from veilfed_study import privacy, privacy_page
from veilfed_study.parts import split_parts
from veilfed_study.store import Store

SUBJECT = made_up()
NAMES = list(privacy.MECHANISMS)


def study(folder: Path, counts: list[int], epsilons: list[float], names: list[str] = NAMES) -> dict[str, Any]:
    return privacy.study(SUBJECT, names, [50, 77], counts, epsilons, Store(folder))


@pytest.fixture(scope="module", autouse=True)
def few_blocks() -> Any:
    """The made-up embeddings have 8 numbers, which 24 blocks do not divide, and there are few steps."""
    with pytest.MonkeyPatch.context() as patch:
        for name, mechanism in privacy.MECHANISMS.items():
            if "blocks" in mechanism.strategy:
                changed = replace(mechanism, strategy={**mechanism.strategy, "blocks": 2, "classifier_rate": 0.05})
                patch.setitem(privacy.MECHANISMS, name, changed)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(tmp_path_factory.mktemp("cells"), [3], [1000.0, 0.05])


def test_noise_costs_accuracy(whole: dict[str, Any]) -> None:
    for row in whole["rows"]:
        none, little, much = (cell["accuracy"]["mean"] for cell in row["cells"])
        assert none > 0.75
        assert little > 0.7
        assert much < 0.6
    assert [cell["epsilon"] for cell in whole["rows"][0]["cells"]] == [None, 1000.0, 0.05]


def test_a_job_spends_what_was_asked_for_and_no_more() -> None:
    names = list(SUBJECT.domains)
    for mechanism in privacy.MECHANISMS.values():
        job = privacy.job_of(SUBJECT, mechanism, 50, names, 2.0)
        assert job.release is not None
        assert 0.98 * 2 < epsilon([job.release] * job.rounds, privacy.DELTA) <= 2


def test_shared_noise_is_less() -> None:
    parts = split_parts(SUBJECT.domains, SUBJECT.classes, 50)
    for name in ("afl", "fedot-update"):
        alone, shared = privacy.MECHANISMS[name], privacy.MECHANISMS[f"{name}-sum"]
        jobs = [privacy.job_of(SUBJECT, mechanism, 50, list(parts), 2.0) for mechanism in (alone, shared)]
        assert jobs[0].release == jobs[1].release
    ridges = [privacy.MECHANISMS[name].ridge(9, 8, 2.0) - 1 for name in ("afl", "afl-sum")]
    assert ridges[0] == pytest.approx(3 * ridges[1])


def test_finished_jobs_are_read_from_their_files(tmp_path: Path, whole: dict[str, Any]) -> None:
    first = study(tmp_path, [3], [4.0], ["afl"])
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert study(tmp_path, [3], [4.0], ["afl"]) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_more_institutions_have_pieces_of_the_domains() -> None:
    parts = split_parts(SUBJECT.domains, SUBJECT.classes, 50)
    assert privacy.institutions_of(parts, 3, 50) is parts
    pieces = privacy.institutions_of(parts, 9, 50)
    assert len(pieces) == 9
    assert sum(len(part.train) for part in pieces.values()) <= sum(len(part.train) for part in parts.values())


def test_the_page_has_its_tables_and_its_plot(whole: dict[str, Any], tmp_path: Path) -> None:
    privacy_page.write_page(whole, tmp_path / "page.md", "a command")
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| method, mode | no noise | epsilon 1000 | epsilon 0.05 |" in text
    assert text.count("FEDOT(+B), sample |") == 4
    assert (tmp_path / "figures" / "made-up-privacy.svg").read_text(encoding="utf-8").count("<svg") == 1
    # The words by hand are about other figures.
    assert "What was found" not in text
    (table,) = privacy_page.keep(whole, tmp_path)
    assert (tmp_path / "tables" / "privacy-3.md").read_text(encoding="utf-8") == table.markdown()
    assert (tmp_path / "plots" / "privacy.png").stat().st_size > 1000


@pytest.mark.parametrize("names", ["", "afl,none"])
def test_unknown_mechanisms_are_refused(names: str) -> None:
    with pytest.raises(VeilfedError) as refused:
        privacy.named(names)
    assert refused.value.code is Code.INPUT_INVALID


def test_an_epsilon_that_no_noise_gives_is_refused() -> None:
    assert privacy.targets([0.5, 4]) == [4, 0.5]
    for value in (0.0, -1.0, 1e6):
        with pytest.raises(VeilfedError) as refused:
            privacy.targets([value])
        assert refused.value.code is Code.INPUT_INVALID
