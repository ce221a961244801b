"""The section `data` of an agent's configuration: one of several sources, told apart by the key `source`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from veilfed.config import Strict

__all__ = [
    "DataConfig",
    "EmojiConfig",
    "HeartConfig",
    "ImageFolderConfig",
    "NumpyConfig",
    "TableConfig",
    "VaderConfig",
]

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


DataConfig = Annotated[
    VaderConfig | EmojiConfig | HeartConfig | ImageFolderConfig | TableConfig | NumpyConfig,
    Field(discriminator="source"),
]
