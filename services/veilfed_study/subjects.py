"""What a study is about: domains with their embeddings and labels, and the model that made the embeddings.

of_task("vader", packages, cache)                      one of the demonstration's tasks
of_folder(folder, "open_clip:ViT-B-32", ...)           images DOMAIN/CLASS/FILE, or a standard set by name
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from client_agent.cache import EmbeddingCache
from client_agent.class_vectors import Prompts, class_means
from client_agent.data import standard
from client_agent.data.benchmark_sets import BENCHMARK_SETS
from client_agent.data.config import Characters, DataConfig
from client_agent.data.source import Samples, class_indices, load
from fm_oracle.models import registry
from fm_oracle.models.base import Model
from veilfed.demo.tasks import TASKS
from veilfed.errors import Code, VeilfedError
from veilfed_study.backbone import Backbone
from veilfed_study.parts import Domain

__all__ = ["Progress", "Subject", "of_folder", "of_samples", "of_task"]

Progress = Callable[[str, int, int], None]  # what, done, of how many
PIECE = 256  # inputs that are embedded between two writes of the cache


@dataclass(frozen=True)
class Subject:
    """`prompts` describe the classes to a text tower; without one there are no class vectors.

    `task` is the demonstration's task whose data these are, if they are: a folder may have the name of one. Of a
    benchmark without domains, the domains are its parts, and `test_domain` is the one that it is tested on. `backbone`
    is the model itself, if it takes prompts.
    """

    name: str
    title: str
    model: str
    version: str
    classes: tuple[str, ...]
    dimension: int
    domains: Mapping[str, Domain]
    text_tower: bool
    _vectors: Callable[[], NDArray[np.float32]] = field(repr=False)
    task: str | None = None
    test_domain: str | None = None
    backbone: Backbone | None = field(default=None, repr=False)

    @property
    def folder(self) -> str:
        """What the folder of its results is called."""
        return f"{self.name}-{_label(self.model)}"

    def class_vectors(self) -> NDArray[np.float32]:
        """[K, d]. Raises VeilfedError(INPUT_INVALID) for a model that reads no text."""
        return self._vectors()

    def digest(self, vectors: bool = False) -> str:
        """Of everything that was read: embeddings, labels, groups; and the class vectors, if they are asked for."""
        total = hashlib.sha256(f"{self.version}:{self.classes}".encode())
        for name, domain in self.domains.items():
            total.update(f"{name}:{len(domain.labels)}:{domain.samples.groups}".encode())
            total.update(domain.features.tobytes())
            total.update(domain.labels.tobytes())
        if vectors:
            total.update(self.class_vectors().tobytes())
        return total.hexdigest()


# What the classes of the demonstration's tasks are called to a model; written down before anything was measured.
PROMPTS: dict[str, Prompts] = {
    "vader": {
        "negative": ["This is a negative text.", "I did not like it at all."],
        "positive": ["This is a positive text.", "I liked it very much."],
    },
    "heart": {
        "absent": ["A healthy patient without heart disease."],
        "present": ["A patient with heart disease."],
    },
}


def of_task(name: str, packages: Path, cache: Path, progress: Progress = lambda what, done, total: None) -> Subject:
    """A task of the demonstration.

    Raises VeilfedError: INPUT_INVALID for an unknown task; DATA_MISSING or MODEL_MISSING for what was not fetched.
    """
    if name not in TASKS:
        raise VeilfedError(Code.INPUT_INVALID, f"there is no task {name!r}", f"Tasks: {', '.join(TASKS)}.")
    task = TASKS[name]
    adapter: TypeAdapter[Any] = TypeAdapter(DataConfig)
    samples = {
        institution: load(adapter.validate_python(section), packages) for institution, section in task.domains.items()
    }
    model = registry.load(task.model, packages)
    found = of_samples(name, task.title, samples, task.classes, model, cache, PROMPTS.get(name), progress)
    return replace(found, task=name)


def of_folder(
    folder: Path,
    model_name: str,
    packages: Path,
    cache: Path,
    *,
    set_name: str | None = None,
    institutions: int | None = None,
    characters: Characters | None = None,
    prompts: Prompts | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Subject:
    """Images in folders DOMAIN/CLASS/FILE, or the standard set or benchmark `set_name`.

    `institutions` and `characters` are for femnist alone.

    Raises VeilfedError: INPUT_INVALID, DATA_INVALID, FILE_UNUSABLE; what the model's `load` says.
    """
    if set_name != "femnist" and (institutions or characters):
        raise VeilfedError(Code.INPUT_INVALID, "institutions and characters are for the set femnist alone")
    if set_name is None:
        samples = _image_folders(folder)
        classes: tuple[str, ...] = tuple(sorted({label for domain in samples.values() for label in domain.labels}))
        title = f"images in {folder.name}"
    elif set_name in BENCHMARK_SETS:
        classes, title, samples = BENCHMARK_SETS[set_name], set_name, _benchmark(set_name, folder)
    else:
        which: Characters = characters or "all"
        classes = standard.classes(set_name, which)
        samples = standard.load_all(set_name, folder, institutions, which)
        title = set_name
    model = registry.load(model_name, packages)
    name = _label(set_name or folder.resolve().name)
    found = of_samples(name, title, samples, classes, model, cache, prompts, progress)
    return replace(found, test_domain="test" if set_name in BENCHMARK_SETS else None)


def _benchmark(name: str, folder: Path) -> dict[str, Samples]:
    """The parts of a benchmark. DTD's are those of its first division, as most papers have it."""
    splits = {"train": "train", "test": "test"}
    if name == "dtd":
        splits = {"train": "train1", "validation": "val1", "test": "test1"}
    adapter: TypeAdapter[Any] = TypeAdapter(DataConfig)
    return {
        part: load(adapter.validate_python({"source": name, "root": folder, "split": split}))
        for part, split in splits.items()
    }


def _image_folders(folder: Path) -> dict[str, Samples]:
    if not folder.is_dir():
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: not a folder")
    adapter: TypeAdapter[Any] = TypeAdapter(DataConfig)
    found: dict[str, Samples] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if (name := _label(path.name)) in found:
            raise VeilfedError(Code.DATA_INVALID, f"{folder}: two domains would be called {name!r}")
        found[name] = load(adapter.validate_python({"source": "image-folder", "root": folder, "domain": path.name}))
    return found


def _label(text: str) -> str:
    """A name as institutions have it."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return label or "data"


def of_samples(
    name: str,
    title: str,
    samples: Mapping[str, Samples],
    classes: Sequence[str],
    model: Model[Any],
    cache: Path,
    prompts: Prompts | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Subject:
    """Embeds what is not in the folder `cache` yet, which has the form of the agents' caches.

    Raises VeilfedError: INPUT_INVALID for fewer than two domains, or a model for other inputs.
    """
    if len(samples) < 2:
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"{name}: {len(samples)} domain; to leave one out, two are needed at least",
            "Give each domain a folder of its own: DOMAIN/CLASS/FILE.",
        )
    domains = {}
    for place, (domain, found) in enumerate(samples.items()):
        if found.modality != model.card.modality:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"the data are {found.modality}s; the model {model.card.name} is for {model.card.modality}s",
            )
        progress(f"embedding {domain}", place, len(samples))
        features = _embedded(model, found.modality, found.inputs, cache, model.embed)
        domains[domain] = Domain(found, features, class_indices(found.labels, classes))
    progress("embedding", len(samples), len(samples))
    asked = prompts or {label: [label.replace("_", " ").replace("-", " ")] for label in classes}

    def vectors() -> NDArray[np.float32]:
        if missing := [label for label in classes if label not in asked]:
            raise VeilfedError(Code.INPUT_INVALID, f"no prompt for the class {missing[0]!r}")
        chosen = {label: asked[label] for label in classes}
        texts = [text for prompts in chosen.values() for text in prompts]
        return class_means(chosen, _embedded(model, "text", texts, cache, model.embed_texts))

    text_tower = model.card.modality == "text" or model.card.text_tower
    card = model.card
    return Subject(
        name,
        title,
        card.name,
        card.version,
        tuple(classes),
        card.dimension,
        domains,
        text_tower,
        vectors,
        backbone=Backbone(model) if card.prompt_width else None,
    )


def _embedded(
    model: Model[Any],
    modality: Literal["text", "image"],
    inputs: Any,
    cache: Path,
    embed: Callable[[Any], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """float32 [n, d], from the cache where they are there."""
    with EmbeddingCache(cache, model.card.version, modality, model.card.dimension) as kept:
        _, absent = kept.get(inputs)
        wanted = list(dict.fromkeys(inputs[index] for index in absent))
        for start in range(0, len(wanted), PIECE):
            piece = wanted[start : start + PIECE]
            kept.add(piece, embed(piece))
        features, _ = kept.get(inputs)
        return features
