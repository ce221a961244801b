"""The public data sets as they are published, and `veilfed data`. Downloaded once for this machine."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter
from typer.testing import CliRunner

from client_agent.data import cli, emoji, heart, vader
from client_agent.data.config import DataConfig
from client_agent.data.source import Samples, load, split
from veilfed import packages
from veilfed.errors import Code, VeilfedError

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)


@pytest.fixture(scope="module")
def folder() -> Path:
    found = packages.default_folder()
    packages.fetch([*vader.FILES.values(), heart.FILE], found)
    return found


def loaded(folder: Path, **keys: object) -> Samples:
    return load(CONFIG.validate_python(keys), folder)


# Counted in the published files by `awk -F'\t' '$2>=0.5 || $2<=-0.5' | wc -l`.
CLEAR_TEXTS = {"tweets": 3432, "amazon": 2985, "movies": 10072, "nyt": 2970}


@pytest.mark.parametrize("domain", CLEAR_TEXTS)
def test_vader_has_the_clearly_rated_texts_of_a_domain(folder: Path, domain: str) -> None:
    everything = loaded(folder, source="vader", domain=domain, limit=0)
    assert len(everything) == CLEAR_TEXTS[domain]
    assert set(everything.labels) == {"negative", "positive"}
    some = loaded(folder, source="vader", domain=domain)
    assert len(some) == 2000
    assert some.inputs == everything.inputs[:2000]
    assert min(Counter(some.labels).values()) > 600


def test_vader_s_ratings_become_classes(folder: Path) -> None:
    tweets = loaded(folder, source="vader", domain="tweets", limit=0)
    label = dict(zip(tweets.inputs, tweets.labels, strict=True))
    assert label["Yay. Another good phone interview."] == "positive"


@pytest.mark.parametrize(("group", "on_both_sides"), [("text", True), ("document", False)])
def test_sentences_of_one_review_stay_together_if_asked_for(folder: Path, group: str, on_both_sides: bool) -> None:
    documents = loaded(folder, source="vader", domain="amazon", group="document").groups
    samples = loaded(folder, source="vader", domain="amazon", group=group)
    train, test = split(samples, ["negative", "positive"], 0.4, 50)
    assert bool({documents[index] for index in train} & {documents[index] for index in test}) is on_both_sides
    assert len(test) == pytest.approx(800, abs=40)


# Counted in the published file: (absent, present).
HOSPITALS = {"cleveland": (165, 139), "hungary": (187, 106), "switzerland": (8, 115), "va-long-beach": (51, 149)}


@pytest.mark.parametrize("hospital", HOSPITALS)
def test_heart_has_the_records_of_a_hospital(folder: Path, hospital: str) -> None:
    samples = loaded(folder, source="heart", hospital=hospital)
    counts = Counter(samples.labels)
    assert (counts["absent"], counts["present"]) == HOSPITALS[hospital]
    assert not any("nan" in str(text).split() for text in samples.inputs)


def test_a_record_is_written_without_what_was_not_measured() -> None:
    record: dict[str, object] = dict.fromkeys(
        ("cp", "trestbps", "chol", "fbs", "restecg", "thalch", "exang", "oldpeak", "slope", "ca", "thal"), None
    )
    record |= {"age": 41, "sex": "Female", "chol": 0.0, "oldpeak": 1.5, "exang": False}
    assert heart.sentence(record) == "young woman of 41 years, no angina on exercise, marked ST depression of 1.5."


def test_emoji_has_ten_classes_of_28_concepts() -> None:
    counts = Counter(label for _, label in emoji.concepts())
    assert len(counts) == 10
    assert set(counts.values()) == {28}
    assert len({concept for concept, _ in emoji.concepts()}) == 280


@pytest.fixture
def drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packages folder with a set of icons of our own: black squares in the lower right quarter."""
    body = '<path fill="currentColor" d="M12 12h12v12H12z"/>'
    data = json.dumps({"width": 24, "icons": {name: {"body": body, "height": 24} for name, _ in emoji.concepts()}})
    path = tmp_path / "icons.json"
    path.write_text(data)
    file = packages.PackageFile("npm", "@test/icons", "1", "icons.json", packages.digest(path))
    target = tmp_path / "npm" / "@test+icons-1" / "icons.json"
    target.parent.mkdir(parents=True)
    path.rename(target)
    monkeypatch.setitem(emoji.FILES, "noto", file)
    return tmp_path


def test_icons_are_drawn_black_on_white(drawings: Path) -> None:
    samples = loaded(drawings, source="emoji", style="noto")
    assert samples.modality == "image"
    assert list(zip(samples.groups, samples.labels, strict=True)) == emoji.concepts()
    image = samples.inputs[0]
    assert isinstance(image, bytes)
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    expected = np.full((112, 112, 3), 255)
    expected[56:, 56:] = 0
    assert np.array_equal(pixels, expected)


def test_what_was_not_fetched_is_missing(tmp_path: Path) -> None:
    for keys in ({"source": "vader", "domain": "nyt"}, {"source": "heart", "hospital": "hungary"}):
        with pytest.raises(VeilfedError) as caught:
            load(CONFIG.validate_python(keys), tmp_path)
        assert caught.value.code is Code.DATA_MISSING
        assert "veilfed data fetch" in caught.value.hint


def test_the_section_may_name_its_own_folder(folder: Path, tmp_path: Path) -> None:
    config = CONFIG.validate_python({"source": "heart", "hospital": "hungary", "folder": str(folder)})
    assert len(load(config, tmp_path)) == 293


def test_data_list_and_fetch(folder: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    fetched = run(cli.app, ["fetch", "vader", "heart", "--folder", str(folder), "--json"])
    assert len(json.loads(fetched.stdout)) == 5
    here = {row["name"]: row["fetched"] for row in json.loads(run(cli.app, ["list", "--json"]).stdout)}
    assert here["vader"]
    assert here["heart"]
    elsewhere = json.loads(run(cli.app, ["list", "--folder", str(tmp_path), "--json"]).stdout)
    assert [row["fetched"] for row in elsewhere] == [False] * 3
    unknown = run(cli.app, ["fetch", "imagenet"]).exception
    assert isinstance(unknown, VeilfedError)
    assert unknown.code is Code.INPUT_INVALID
