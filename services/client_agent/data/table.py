"""Texts in a table: CSV or Parquet."""

import re
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
    names = [config.text] if isinstance(config.text, str) else config.text
    for name in dict.fromkeys([*names, config.label, *([config.group] if config.group else [])]):
        if list(table.columns).count(name) != 1:
            raise invalid(f"{where}: needs one column {name!r}")
    texts = _column(table, names[0], where) if isinstance(config.text, str) else _sentences(table, names)
    labels = _column(table, config.label, where)
    check_texts(texts, where)
    check_labels(labels, where)
    groups = _column(table, config.group, where) if config.group else [content_group(text) for text in texts]
    return Samples("text", texts, labels, groups)


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
    except pd.errors.ParserError as error:
        line = re.search(r"in line (\d+)", str(error))  # nothing else of the message, which may quote the content
        raise invalid(f"{path}: {f'line {line[1]} has too many fields' if line else 'not readable as CSV'}") from None
    except Exception:  # noqa: BLE001, RUF100  the readers' own errors, which may quote the content
        raise invalid(f"{path}: not a CSV file with a header or a Parquet file") from None
    table.columns = pd.Index(table.iloc[0])
    return table.iloc[1:]


def _column(table: pd.DataFrame, name: str, where: str) -> list[str]:
    """A column's values as strings. Raises DATA_INVALID naming the first row without a value."""
    missing = table[name].isna().to_numpy().nonzero()[0]
    if len(missing):
        raise invalid(f"{where}: row {int(missing[0]) + 1} has nothing in the column {name!r}")
    return [str(value) for value in table[name].tolist()]


def _sentences(table: pd.DataFrame, names: list[str]) -> list[str]:
    """Each row in words: "age 63, sex male", without what is missing or empty."""
    rows = zip(*(table[name].tolist() for name in names), strict=True)
    return [
        ", ".join(
            f"{name} {value}"
            for name, value in zip(names, row, strict=True)
            if not pd.isna(value) and str(value).strip()
        )
        for row in rows
    ]
