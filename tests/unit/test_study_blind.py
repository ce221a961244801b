"""The study of BlindFed, on made-up block outputs."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.data.source import Samples, split
from client_agent.trainers import method_for
from tests.support.methods import strategy
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed_study import simulation
from veilfed_study.analytic import clients_of
from veilfed_study.blind import Grid, Place, Settings, drawn, study, variants
from veilfed_study.blind_data import BlindSubject, students_of
from veilfed_study.blind_page import page, tables, write_page
from veilfed_study.parts import TEST_FRACTION, Domain, Part
from veilfed_study.store import Store

N, L, D, CLASSES = 120, 3, 6, ("a", "b")
GRID = Grid([3, 5], [1.0, 100.0], [8, 2])
SETTINGS = Settings(rounds=10, rate=0.5, alpha=1.0)


def made_up(seed: int = 0) -> BlindSubject:
    """The tokens of an example lie on both sides of zero, in the direction of its class: their mean says nothing."""
    rng = np.random.default_rng(seed)
    labels = np.arange(N) % 2
    lengths = 2 * rng.integers(1, 4, N)
    owners = np.repeat(np.arange(N), lengths)
    signs = np.where(np.arange(len(owners)) % 2, 3.0, -3.0)
    streams = rng.normal(0, 0.3, (len(owners), L, D))
    streams[:, :, :2] += (np.eye(2)[labels[owners]] * signs[:, None])[:, None]
    names = [str(row) for row in range(N)]
    samples = Samples("text", names, [CLASSES[label] for label in labels], names)
    embeddings = {
        "student": rng.normal(0, 1, (N, D)).astype(np.float32),
        "teacher": (np.eye(2, D)[labels] + rng.normal(0, 0.1, (N, D))).astype(np.float32),
    }
    about = {"fm": "none", "blocks": L, "train": 9, "test": 3, "teacher_accuracy": 1.0, "student_accuracy": 0.5}
    return BlindSubject(
        "made-up",
        samples,
        labels,
        CLASSES,
        lengths,
        streams.astype(np.float32),
        embeddings,
        about,
        f"digest {seed}",
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("cells")
    return study([made_up()], [50], GRID, SETTINGS, Store(folder)), folder


def rows_of(document: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in document["students"][0]["rows"]}


def means(row: dict[str, Any]) -> list[float]:
    return [cell["accuracy"]["mean"] for cell in row["cells"]]


def test_adapters_find_what_no_probe_of_means_can(found: tuple[dict[str, Any], Path]) -> None:
    rows = rows_of(found[0])
    for sampling in ("fixed", "round", "all"):
        assert means(rows[f"adapters-{sampling}"])[0] > 0.85, sampling
    assert means(rows["probe"])[0] < 0.65
    assert means(rows["probe-averaging"])[0] < 0.65
    assert means(rows["probe-teacher"])[0] > 0.95


def test_what_is_run_where(found: tuple[dict[str, Any], Path]) -> None:
    document, rows = found[0], rows_of(found[0])
    assert [place["label"] for place in document["places"]] == [
        "centralised",
        "3 clients, alpha 1",
        "3 clients, alpha 100",
        "5 clients, alpha 1",
    ]
    assert [len(row["cells"]) for row in rows.values()] == [4, 4, 4, 1, 1, 4, 4, 4, 4]
    assert rows["adapters-rank-2"]["rank"] == 2
    assert rows["adapters-rank-2"]["cells"][0]["place"] == "centralised"
    assert rows["adapters-epochs"]["cells"][0]["place"] == "3 clients, alpha 1"
    assert document["rows"] == {"training": 72, "test": 48}
    for row in (rows["probe"], rows["probe-teacher"]):
        assert len(set(means(row))) == 1, "AFL comes to one solution, however the rows are divided"


def test_parameters_are_those_that_are_trained(found: tuple[dict[str, Any], Path]) -> None:
    rows = rows_of(found[0])

    def adapters(rank: int, first: int) -> int:
        return (L - first + 1) * 2 * rank * D + len(CLASSES) * (D + 1)

    assert rows["adapters-all"]["parameters"] == [adapters(8, 1)]
    assert rows["adapters-fixed"]["parameters"] == [adapters(8, drawn(L, 50)[0])]
    assert rows["probe"]["parameters"] == [len(CLASSES) * D]


def test_a_study_that_was_stopped_goes_on(found: tuple[dict[str, Any], Path]) -> None:
    document, folder = found
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert study([made_up()], [50], GRID, SETTINGS, Store(folder)) == document
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    small = Grid([3], [1.0], [2])
    for subject, settings in ((made_up(1), SETTINGS), (made_up(), Settings(rounds=1))):
        study([subject], [50], small, settings, Store(folder))
    assert len(list(folder.iterdir())) > len(times)


def test_fixed_blocks_are_a_job_like_any_other(found: tuple[dict[str, Any], Path]) -> None:
    """The same models as the simulation of the job that an administrator would submit."""
    subject, seed, blocks = made_up(), 50, drawn(L, 50)
    train, held = split(subject.samples, CLASSES, TEST_FRACTION, seed)
    domain = Domain(subject.samples, subject.features(np.arange(N), blocks), subject.labels)
    parts = clients_of(Part(domain, train, held), 3, 1.0, seed)
    job = JobSpec.model_validate(
        {
            "name": "blind",
            "strategy": strategy(
                "blindfed",
                classes=list(CLASSES),
                dimension=D,
                blocks=L,
                released=blocks,
                tokens=subject.tokens,
                rank=8,
                rate=0.5,
            ).model_dump(),
            "cohort": {"train": list(parts)},
            "rounds": 10,
            "quorum": 3,
            "seed": seed,
            "secure_aggregation": {},
        }
    )
    *_, last = simulation.rounds(job, parts)
    part = next(iter(parts.values()))
    right, of = method_for(job.strategy).evaluate(last.model, None, *part.evaluation)
    assert rows_of(found[0])["adapters-fixed"]["cells"][1]["accuracy"]["seeds"][0] == right / of


def test_features_are_masks_and_outputs() -> None:
    subject = made_up()
    rows = np.array([5, 2, 110])
    found = subject.features(rows, [1, 3])
    assert found.shape == (3, subject.tokens, 1 + 2 * D)
    starts = np.concatenate([[0], np.cumsum(subject.lengths)])
    for place, row in enumerate(rows):
        length = subject.lengths[row]
        for token in range(subject.tokens):
            wanted = np.zeros(1 + 2 * D)
            if token < length:
                outputs = subject.streams[starts[row] + token]
                wanted = np.concatenate([[1], outputs[0], outputs[2]])
            np.testing.assert_array_equal(found[place, token], wanted.astype(np.float32))
        mean = subject.streams[starts[row] : starts[row + 1], 1].mean(axis=0)
        np.testing.assert_allclose(subject.pooled(2)[row], mean, atol=1e-6)


def test_blocks_are_drawn_once_or_in_each_round() -> None:
    for seed in (50, 77):
        rounds = [drawn(9, seed, number) for number in range(30)]
        assert len({tuple(blocks) for blocks in rounds}) > 10
        assert not any(block + 1 in blocks for blocks in rounds for block in blocks)
    assert drawn(9, 50) == drawn(9, 50) == drawn(9, 50, 0)


def test_variants_have_names_of_their_own() -> None:
    made = variants([16, 4, 64], ["table", "student", "teacher"])
    assert len({variant.name for variant in made}) == len({variant.label for variant in made}) == len(made) == 11
    assert [(variant.rank, variant.only) for variant in made if variant.only is not None] == [(4, 0), (64, 0), (16, 1)]
    assert Place(1, None).label == "centralised"


def test_the_page_has_every_table_and_says_what_is_not_run(found: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    document = found[0]
    (table,) = tables(document)
    assert len(table.columns) == 1 + 4 + 1
    write_page(document, tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text()
    assert table.markdown() in text
    assert text == page(document)
    assert "## made-up" in text
    assert "Not run" in text
    assert "What was found" not in text, "what is said by hand is about other students"


@pytest.mark.parametrize("said", [["minilm"], ["=file"], ["a=x", "a=y"], ["a b=x"]])
def test_students_are_labels_and_files(said: list[str]) -> None:
    assert students_of(["one=a.st", "two=b=c.st"]) == {"one": Path("a.st"), "two": Path("b=c.st")}
    with pytest.raises(VeilfedError, match="LABEL=FILE") as refused:
        partial(students_of, said)()
    assert refused.value.code is Code.INPUT_INVALID
