"""The section `data` of an agent's configuration: one of several sources, told apart by the key `source`."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from client_agent.data.domain_sets import DOMAIN_SETS
from veilfed.config import Strict

__all__ = [
    "Characters",
    "CifarConfig",
    "DataConfig",
    "DomainSetConfig",
    "DtdConfig",
    "EmojiConfig",
    "FemnistConfig",
    "Groups",
    "HeartConfig",
    "HuggingFaceConfig",
    "ImageFolderConfig",
    "NumpyConfig",
    "SvhnConfig",
    "TableConfig",
    "VaderConfig",
]

Characters = Literal["all", "digits"]
Groups = Literal["writer", "content"]
Column = Annotated[str, Field(min_length=1, max_length=200)]


class VaderConfig(Strict):
    """Short texts with the sentiment that people gave them (VADER, ICWSM 2014): negative or positive."""

    source: Literal["vader"]
    domain: Literal["tweets", "amazon", "movies", "nyt"]
    # Texts, the same ones each time; 0 for all.
    limit: int = Field(default=2000, ge=0)
    # What never straddles training and test: the single text, or all texts of one review or article.
    group: Literal["text", "document"] = "text"
    # Where `veilfed data fetch` put the data, if not in the agent's packages folder.
    folder: Path | None = None


class EmojiConfig(Strict):
    """Icons of 10 classes in one of five drawing styles."""

    source: Literal["emoji"]
    style: Literal["noto", "twemoji", "openmoji", "fluent-emoji", "fluent-emoji-high-contrast"]
    folder: Path | None = None


class HeartConfig(Strict):
    """Records of one of four hospitals (UCI heart disease), each written as a sentence: absent or present."""

    source: Literal["heart"]
    hospital: Literal["cleveland", "hungary", "switzerland", "va-long-beach"]
    folder: Path | None = None


class ImageFolderConfig(Strict):
    """Files ROOT/DOMAIN/CLASS/*.png, *.jpg, *.jpeg or *.webp; without `domain`, ROOT/CLASS/*."""

    source: Literal["image-folder"]
    root: Path
    domain: str | None = Field(default=None, pattern=r"^[^/\\.][^/\\]*$")
    # What never straddles training and test: equal files, or all files of one name (without its ending).
    group: Literal["content", "name"] = "content"


class TableConfig(Strict):
    """A CSV file with a header (UTF-8), or a Parquet file; one row per text."""

    source: Literal["table"]
    path: Path
    # The column of texts; or several columns, which become one text "name value, name value" without what is missing.
    text: Column | Annotated[list[Column], Field(min_length=1)] = "text"
    label: Column = "label"
    # Rows of equal value never straddle training and test (a patient, say); without it, rows of equal text.
    group: Column | None = None


class NumpyConfig(Strict):
    """An .npz file with `texts` [n] (strings) or `images` uint8 [n, h, w, 3], and `labels` [n]; optionally `groups`."""

    source: Literal["numpy"]
    path: Path


class HuggingFaceConfig(Strict):
    """A folder that `save_to_disk` of the library datasets wrote; of several splits, one."""

    source: Literal["huggingface"]
    path: Path
    # Of a dictionary of splits.
    split: str | None = Field(default=None, pattern=r"^[^/\\.][^/\\]*$")
    # One of the two: the column of texts, or of encoded images.
    text: Column | None = None
    image: Column | None = None
    label: Column = "label"
    # Rows of equal value never straddle training and test; without it, rows of equal content.
    group: Column | None = None

    @model_validator(mode="after")
    def _one_modality(self) -> Self:
        if (self.text is None) == (self.image is None):
            raise ValueError("text or image: name one of the two columns")
        return self


class DomainSetConfig(Strict):
    """One domain of a standard set of images, in its usual folder: see docs/how-to/bring-your-data.md."""

    source: Literal["pacs", "vlcs", "office-home", "terra-incognita"]
    # The set's own folder, or the one above it.
    root: Path
    domain: str

    @model_validator(mode="after")
    def _known_domain(self) -> Self:
        domains = DOMAIN_SETS[self.source].domains
        if self.domain not in domains:
            raise ValueError(f"domain: {self.source} has {', '.join(domains)}")
        return self


class FemnistConfig(Strict):
    """Handwritten characters of some writers, from the folder of JSON files that LEAF makes."""

    source: Literal["femnist"]
    root: Path
    # The writers are dealt in turn to this many institutions; this one is number `institution`, from 1.
    institutions: int = Field(ge=1, le=10_000)
    institution: int = Field(ge=1)
    # 62 classes, or the ten digits alone.
    characters: Characters = "all"
    # What never straddles training and test: all characters of a writer, or equal images.
    group: Groups = "writer"

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if self.institution > self.institutions:
            raise ValueError(f"institution: from 1 to {self.institutions}")
        return self


class CifarConfig(Strict):
    """CIFAR-10 or CIFAR-100, from the files of the binary version."""

    source: Literal["cifar-10", "cifar-100"]
    # The set's own folder, or the one above it.
    root: Path
    split: Literal["train", "test"] = "train"


class SvhnConfig(Strict):
    """The cropped digits of SVHN, from the folder of its MATLAB files."""

    source: Literal["svhn"]
    root: Path
    split: Literal["train", "test", "extra"] = "train"


class DtdConfig(Strict):
    """DTD's textures, from its own folder or the one above it."""

    source: Literal["dtd"]
    root: Path
    # One of the set's lists, such as train1; without it, all images.
    split: str | None = Field(default=None, pattern=r"^(train|val|test)([1-9]|10)$")


DataConfig = Annotated[
    VaderConfig
    | EmojiConfig
    | HeartConfig
    | ImageFolderConfig
    | TableConfig
    | NumpyConfig
    | HuggingFaceConfig
    | DomainSetConfig
    | FemnistConfig
    | CifarConfig
    | SvhnConfig
    | DtdConfig,
    Field(discriminator="source"),
]
