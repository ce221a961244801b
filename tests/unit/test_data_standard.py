"""The standard sets from small folders of their layout: names, classes, what is wrong with a folder."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from client_agent.data import image_folder, source, standard
from client_agent.data.config import DataConfig
from client_agent.data.domain_sets import DOMAIN_SETS
from client_agent.data.samples import Samples
from tests.support.models import png
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import LABEL

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)
PER_CLASS = 2


def make(root: Path, name: str) -> Path:
    """A folder of the set's layout, with images that differ."""
    spec = DOMAIN_SETS[name]
    number = 0
    for domain in spec.domains.values():
        for label in spec.classes:
            folder = root / domain / label
            folder.mkdir(parents=True)
            for index in range(PER_CLASS):
                number += 1
                pixels = np.full((4, 4, 3), [number % 256, number // 256, index], np.uint8)
                (folder / f"{index}.jpg").write_bytes(png(pixels))
    (root / "ImageInfo.csv").write_text("beside the domains")
    return root


def loaded(name: str, root: Path, domain: str) -> Samples:
    return source.load(CONFIG.validate_python({"source": name, "root": root, "domain": domain}))


# As the publications state them.
PUBLISHED = {"pacs": (4, 7), "vlcs": (4, 5), "office-home": (4, 65), "terra-incognita": (4, 10)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_domain_of_a_set_is_loaded_with_its_classes(tmp_path: Path, name: str) -> None:
    domains, classes = PUBLISHED[name]
    root = make(tmp_path / DOMAIN_SETS[name].folder, name)
    found = standard.load_all(name, tmp_path)
    assert len(found) == domains
    assert len(standard.classes(name)) == classes
    assert len({image for samples in found.values() for image in samples.inputs}) == domains * classes * PER_CLASS
    for domain, samples in found.items():
        assert samples == loaded(name, root, domain)
        assert sorted(samples.labels) == sorted(standard.classes(name) * PER_CLASS)
        folder = root / DOMAIN_SETS[name].domains[domain]
        assert samples.inputs[0] == (folder / samples.labels[0] / "0.jpg").read_bytes()


def test_the_sections_are_those_of_agents_and_their_names_can_be_institutions(tmp_path: Path) -> None:
    for name in standard.NAMES:
        count = 75 if name == "femnist" else None
        for institution, section in standard.sections(name, tmp_path, count).items():
            assert re.fullmatch(LABEL, institution)
            assert CONFIG.validate_python(section).source == name
    with pytest.raises(VeilfedError, match="number of institutions") as caught:
        standard.sections("pacs", tmp_path, institutions=3)
    assert caught.value.code is Code.INPUT_INVALID


def test_an_unknown_set_or_domain_names_those_that_there_are(tmp_path: Path) -> None:
    for call in (lambda: standard.classes("cifar"), lambda: standard.sections("cifar", tmp_path)):
        with pytest.raises(VeilfedError, match="pacs, vlcs, office-home, terra-incognita, femnist"):
            call()
    with pytest.raises(ValidationError, match="art-painting, cartoon, photo, sketch"):
        CONFIG.validate_python({"source": "pacs", "root": tmp_path, "domain": "clipart"})


def error_of(root: Path) -> VeilfedError:
    with pytest.raises(VeilfedError) as caught:
        loaded("pacs", root, "photo")
    return caught.value


def test_another_layout_is_refused_with_the_expected_one(tmp_path: Path) -> None:
    error = error_of(make(tmp_path, "vlcs"))
    assert error.code is Code.DATA_INVALID
    for named in (str(tmp_path), "'photo'", "'art_painting'", "DomainBed", "7 classes", "dog"):
        assert named in error.message


def test_missing_and_unknown_classes_are_named(tmp_path: Path) -> None:
    root = make(tmp_path, "pacs")
    for file in (root / "photo" / "horse").iterdir():
        file.unlink()
    assert "no images of 'horse', and 1 of 7" in error_of(root).message
    (root / "photo" / "horse").rename(root / "photo" / "zebra")
    (root / "photo" / "zebra" / "0.jpg").write_bytes(png(np.zeros((4, 4, 3), np.uint8)))
    assert "'zebra' is no class of PACS" in error_of(root).message


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    root = make(tmp_path, "pacs")
    path = root / "photo" / "horse" / "1.jpg"
    path.write_bytes(path.read_bytes()[:40])
    error = error_of(root)
    assert error.code is Code.DATA_INVALID
    assert str(path) in error.message


@pytest.mark.parametrize("limit", ["MAX_PIXELS", "MAX_FILE_BYTES"])
def test_images_that_no_oracle_takes_are_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    root = make(tmp_path, "pacs")
    noise = np.random.default_rng(0).integers(0, 256, (40, 80, 3), np.uint8)
    large = root / "photo" / "dog" / "0.jpg"
    large.write_bytes(png(noise))
    monkeypatch.setattr(image_folder, limit, 3000)  # a picture of 16 million pixels takes seconds to make
    monkeypatch.setattr(image_folder, "SHRUNK_SIDE", 20)
    samples = loaded("pacs", root, "photo")
    assert isinstance(samples.inputs[0], bytes)
    assert Image.open(io.BytesIO(samples.inputs[0])).size == (20, 10)
    assert samples.inputs[1] == (root / "photo" / "dog" / "1.jpg").read_bytes()
    own = {"source": "image-folder", "root": root, "domain": "photo"}
    with pytest.raises(VeilfedError, match="make it smaller"):  # an institution's own images are never changed
        source.load(CONFIG.validate_python(own))


def test_the_documented_sections_are_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "bring-your-data.md").read_text()
    sections = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    sources = {CONFIG.validate_python(section["data"]).source for section in sections if "data" in section}
    own = {"table", "image-folder", "numpy", "huggingface"}
    assert sources == own | {"pacs", "femnist", "cifar-100", "svhn", "dtd"}
