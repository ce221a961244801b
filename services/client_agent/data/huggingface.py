"""A data set that the library datasets wrote with `save_to_disk`: Arrow files and two small JSON files beside them.

Read by pyarrow alone, so that an agent needs neither the library nor its hub.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from client_agent.data.config import HuggingFaceConfig
from client_agent.data.image_folder import check_image
from client_agent.data.samples import Samples, check_labels, check_texts, content_group, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["load"]


def load(config: HuggingFaceConfig) -> Samples:
    """One sample per row, in their order; rows in errors count from 1. Class numbers become the names of the data set.

    Raises VeilfedError: DATA_INVALID, or FILE_UNUSABLE for what cannot be read.
    """
    folder = _folder(config)
    where = str(folder)
    features = _json(folder / "dataset_info.json").get("features") or {}
    content = config.text or config.image or ""
    table = _table(folder, list(dict.fromkeys([content, config.label, *([config.group] if config.group else [])])))
    labels = _labels(table.column(config.label), features.get(config.label), f"{where}: column {config.label!r}")
    check_labels(labels, where)
    groups = _strings(table.column(config.group), f"{where}: column {config.group!r}") if config.group else None
    if config.text:
        texts = table.column(config.text).to_pylist()
        check_texts(texts, where)
        return Samples("text", texts, labels, groups or [content_group(text) for text in texts])
    images = _images(table.column(config.image), f"{where}: column {config.image!r}")
    return Samples("image", images, labels, groups or [content_group(image) for image in images])


def _folder(config: HuggingFaceConfig) -> Path:
    """The folder of the data set itself, or of the wanted split."""
    if not config.path.is_dir():
        raise VeilfedError(Code.FILE_UNUSABLE, f"{config.path}: not a folder")
    index = config.path / "dataset_dict.json"
    if not index.is_file():
        if config.split:
            raise invalid(f"{config.path}: one data set, without splits; leave out `split`")
        return config.path
    splits = _json(index).get("splits")
    if not isinstance(splits, list) or config.split not in splits:
        names = ", ".join(str(name) for name in splits) if isinstance(splits, list) else "none"
        raise invalid(f"{config.path}: name one of its splits with `split`: {names}")
    return config.path / str(config.split)


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise invalid(
            f"{path}: no such file; a folder that save_to_disk of the library datasets wrote is needed"
        ) from None
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise invalid(f"{path}: not a JSON object")
    return document


def _table(folder: Path, columns: list[str]) -> Any:
    """The wanted columns of all rows."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise invalid(f"{folder}: rows selected by an index of an old version; write it again with flatten_indices()")
    try:
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise invalid(f"{folder / 'state.json'}: does not name the data files") from None
    parts = [_read(folder, name, columns) for name in names]
    if not parts:
        raise invalid(f"{folder}: no samples")
    try:
        return pa.concat_tables(parts)
    except pa.ArrowException:
        raise invalid(f"{folder}: the data files differ in the types of their columns") from None


def _read(folder: Path, name: str, columns: list[str]) -> Any:
    path = folder / name
    if path.parent != folder:
        raise invalid(f"{folder / 'state.json'}: names a data file outside of its folder")
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_stream(source).read_all()
    except OSError as error:
        if not path.is_file():
            raise invalid(f"{path}: no such file, but state.json names it") from None
        raise _unreadable(path, error) from None
    except pa.ArrowException as error:
        raise _unreadable(path, error) from None
    for column in columns:
        if table.column_names.count(column) != 1:
            raise invalid(f"{path}: needs one column {column!r}; there are {', '.join(table.column_names)}")
    return table.select(columns)


def _unreadable(path: Path, error: Exception) -> VeilfedError:
    return invalid(f"{path}: not an Arrow file that can be read ({type(error).__name__})")


def _labels(column: Any, feature: Any, where: str) -> list[str]:
    names = feature.get("names") if isinstance(feature, dict) else None
    values = _strings(column, where)
    if not isinstance(names, list):
        return values
    known = {str(index): str(name) for index, name in enumerate(names)}
    for row, value in enumerate(values, start=1):
        if value not in known:
            raise invalid(f"{where}: row {row} is not one of its {len(names)} classes")
    return [known[value] for value in values]


def _strings(column: Any, where: str) -> list[str]:
    if not (pa.types.is_integer(column.type) or _is_text(column.type)):
        raise invalid(f"{where} is {column.type}; strings or whole numbers are needed")
    values = column.to_pylist()
    if None in values:
        raise invalid(f"{where}: row {values.index(None) + 1} has no value")
    return [str(value) for value in values]


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _images(column: Any, where: str) -> list[bytes]:
    """The encoded images of an `Image` column: {bytes, path} in each row."""
    if not pa.types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
        raise invalid(f"{where} is {column.type}; a column of the type Image is needed")
    images = []
    for row, value in enumerate(column.to_pylist(), start=1):
        data = (value or {}).get("bytes")
        if not isinstance(data, bytes):
            raise invalid(f"{where}: row {row} has no image in it; images must be saved in the data set, not beside it")
        check_image(data, f"{where}: row {row}")
        images.append(data)
    return images
