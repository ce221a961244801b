"""Texts in a table: CSV or Parquet."""

from pathlib import Path

import pandas as pd

from client_agent.data.config import TableConfig
from client_agent.data.samples import Samples, check_labels, check_texts, content_group, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["load"]


def load(config: TableConfig) -> Samples:
    """One sample per row; rows in errors count from 1, without the header.

    Raises VeilfedError: DATA_INVALID, or FILE_UNUSABLE for a file that cannot be read.
    """
    where = str(config.path)
    table = _read(config.path)
    columns = {"text": config.text, "label": config.label} | ({"group": config.group} if config.group else {})
    for column in columns.values():
        if list(table.columns).count(column) != 1:
            raise invalid(f"{where}: needs one column {column!r}")
    values = {name: _texts(table[column], f"{where}: column {column!r}") for name, column in columns.items()}
    check_texts(values["text"], where)
    check_labels(values["label"], where)
    groups = values.get("group") or [content_group(text) for text in values["text"]]
    return Samples("text", values["text"], values["label"], groups)


def _read(path: Path) -> pd.DataFrame:
    try:
        if path.suffix.lower() in {".parquet", ".pq"}:
            return pd.read_parquet(path)
        # Everything as written: "NA" is a text, "007" a label. `header=None` keeps names that occur twice as they are.
        table = pd.read_csv(path, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror or 'not readable'}") from None
    except pd.errors.EmptyDataError:
        raise invalid(f"{path}: no samples") from None
    except UnicodeDecodeError:
        raise invalid(f"{path}: not UTF-8 text") from None
    except Exception:  # noqa: BLE001, RUF100  the readers' own errors, which may quote the content
        raise invalid(f"{path}: not a CSV file with a header or a Parquet file") from None
    table.columns = pd.Index(table.iloc[0])
    return table.iloc[1:]


def _texts(column: "pd.Series[str]", where: str) -> list[str]:
    """The column's values as strings. Raises DATA_INVALID naming the first row without a value."""
    missing = column.isna().to_numpy().nonzero()[0]
    if len(missing):
        raise invalid(f"{where}: row {int(missing[0]) + 1} has no value")
    return [str(value) for value in column.tolist()]
