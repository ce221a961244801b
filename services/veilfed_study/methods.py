"""The methods of the comparison, and the settings that they are run with.

A method of a study is a strategy of a job with some of its keys fixed: FEDOT and FEDOT(+B) are one strategy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field

from veilfed.config import Strict, read_text, validate
from veilfed.errors import Code, VeilfedError

__all__ = [
    "METHODS",
    "MethodSettings",
    "Settings",
    "StudyMethod",
    "built_in_settings",
    "named",
    "possible",
    "read_settings",
    "with_rounds",
]


@dataclass(frozen=True)
class StudyMethod:
    """`strategy` are the keys that make it what it is; `rates` are those that are to be chosen.

    `defaults` are other keys where the settings do not have them.
    """

    label: str
    strategy: Mapping[str, Any]
    rates: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    class_vectors: bool = False
    trains: bool = True
    # Without aggregation a newcomer gets nothing that was learned.
    generalises: bool = True


VECTORS = {"initial": "class_vectors"}
IDENTITY = {"name": "fedot", "transform": "identity"}
W, X = "classifier_rate", "transform_rate"
# With the job's own default, one block, FEDOT(+B) would be FEDOT. Eight divide the dimensions of the usual models.
BLOCKS = {"blocks": 8}

METHODS: dict[str, StudyMethod] = {
    "zero-shot": StudyMethod("zero-shot", {**IDENTITY, **VECTORS}, class_vectors=True, trains=False),
    "averaging": StudyMethod("averaging (w_l = I)", IDENTITY, (W,)),
    "fedclip": StudyMethod("FedCLIP, trained classifier", {"name": "fedclip"}, (W, "attention_rate")),
    "fedclip-text": StudyMethod(
        "FedCLIP, class vectors",
        {"name": "fedclip", "train_classifier": False, **VECTORS},
        ("attention_rate",),
        class_vectors=True,
    ),
    "fedgh": StudyMethod("FedGH", {"name": "fedgh"}, (X, "header_rate")),
    "fedlt": StudyMethod("FedLT", {"name": "fedlt"}, (W, X)),
    "fedadapter": StudyMethod("FedAdapter", {"name": "fedadapter"}, (W, "adapter_rate")),
    "all-global": StudyMethod("FEDOT, all global", {"name": "all-global"}, (W, X, "blocks"), BLOCKS),
    "all-local": StudyMethod("FEDOT, all local", {"name": "all-local"}, (W, X, "blocks"), BLOCKS, generalises=False),
    "fedot": StudyMethod("FEDOT", {"name": "fedot", "blocks": 1}, (W, X)),
    "fedot-b": StudyMethod("FEDOT(+B)", {"name": "fedot"}, (W, X, "blocks"), BLOCKS),
    "fedot-b-text": StudyMethod(
        "FEDOT(+B), class vectors", {"name": "fedot", **VECTORS}, (W, X, "blocks"), BLOCKS, class_vectors=True
    ),
}


class MethodSettings(Strict):
    """How one method is run; keys of `strategy` that are missing have the job's defaults."""

    rounds: int = Field(10, ge=0, le=100_000)
    strategy: dict[str, Any] = Field(default_factory=dict)


class Settings(Strict):
    """Settings by method. A method that is not listed has the defaults of a job.

    `split` is the seed of the split into training and test rows that they were chosen for: a study with these settings
    has that split for all its seeds, so no row that they were chosen on is tested on. Without it each seed has the
    split of its own, as over the services.
    """

    split: int | None = Field(None, ge=0, lt=2**31)
    methods: dict[str, MethodSettings] = Field(default_factory=dict)

    def of(self, method: str) -> MethodSettings:
        return self.methods.get(method, MethodSettings())

    def split_of(self, seed: int) -> int:
        """The seed of the split in a study with this seed."""
        return seed if self.split is None else self.split


def named(names: str) -> list[str]:
    """The methods of a list such as "fedot,averaging", in the order of the table; or of "all".

    Raises VeilfedError(INPUT_INVALID) for an unknown method.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == ["all"]:
        return list(METHODS)
    unknown = [name for name in wanted if name not in METHODS]
    if unknown or not wanted:
        which = f"there is no method {unknown[0]!r}" if unknown else "no method is named"
        raise VeilfedError(Code.INPUT_INVALID, which, f"Methods: all, {', '.join(METHODS)}.")
    return [name for name in METHODS if name in wanted]


def possible(names: Sequence[str], text_tower: bool) -> list[str]:
    """Those of the methods that can be run: without a text tower there are no class vectors, and `all` does without.

    Raises VeilfedError(INPUT_INVALID) where single methods were named and one of them cannot be run.
    """
    missing = [name for name in names if METHODS[name].class_vectors and not text_tower]
    if missing and len(names) < len(METHODS):
        raise VeilfedError(Code.INPUT_INVALID, f"{missing[0]} needs vectors of the classes; the model reads no text")
    return [name for name in names if name not in missing]


def read_settings(path: Path) -> Settings:
    """The settings of a YAML or JSON file, such as `veilfed study sweep` writes.

    Raises VeilfedError: INPUT_INVALID naming line and key, FILE_UNUSABLE.
    """
    return _checked(read_text(path), str(path))


def built_in_settings(task: str) -> Settings:
    """Those that were chosen for a task on validation data; defaults for a task without any."""
    resource = files("veilfed_study").joinpath("settings", f"{task}.yaml")
    return _checked(resource.read_text(encoding="utf-8"), f"settings of {task}") if resource.is_file() else Settings()


def _checked(text: str, where: str) -> Settings:
    found = validate(Settings, text, where, Code.INPUT_INVALID)
    for name in found.methods:
        if name not in METHODS:
            raise VeilfedError(
                Code.INPUT_INVALID, f"{where}: there is no method {name!r}", f"Methods: {', '.join(METHODS)}."
            )
    return found


def with_rounds(settings: Settings, methods: Sequence[str], rounds: int) -> Settings:
    """The settings with this number of rounds for each of the methods."""
    changed = {name: settings.of(name).model_copy(update={"rounds": rounds}) for name in methods}
    return settings.model_copy(update={"methods": {**settings.methods, **changed}})
