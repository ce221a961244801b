"""VADER: short texts of four kinds, rated by people between -4 and 4 (Hutto & Gilbert, ICWSM 2014; MIT licence).

In the source distribution of the package vaderSentiment. Texts with |rating| < 0.5 are left out as neither.
"""

import hashlib
from pathlib import Path

from client_agent.data.config import VaderConfig
from client_agent.data.samples import Samples, check_labels, check_texts, content_group, invalid
from veilfed.packages import PackageFile, read

__all__ = ["FILES", "load"]

CLASSES = ("negative", "positive")
LEAST_RATING = 0.5
ARCHIVE = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"


def _file(name: str, sha256: str) -> PackageFile:
    inner = f"hutto_ICWSM_2014.tar.gz!hutto_ICWSM_2014/{name}_GroundTruth.txt"
    member = f"vaderSentiment-3.3.2/additional_resources/{inner}"
    return PackageFile("pypi", "vaderSentiment", "3.3.2", member, sha256, ARCHIVE)


FILES = {
    "tweets": _file("tweets", "dfbe7102e2f92579ed8b19df9a3822491880697c67adf712fb66e520cc05102f"),
    "amazon": _file("amazonReviewSnippets", "11a9807a0974a2506a2d3b4851eaf69b3d6d20688ce4923adda2312a4f6dd6c2"),
    "movies": _file("movieReviewSnippets", "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350"),
    "nyt": _file("nytEditorialSnippets", "7d8fbcce7dde5d716da53e78f4ef4be6b706e9ef1e1d51887e6d0ad4b69cc27e"),
}


def load(config: VaderConfig, folder: Path) -> Samples:
    """The texts of a domain; `limit` takes those whose identifiers have the smallest SHA-256."""
    file = FILES[config.domain]
    rows = []
    for number, line in enumerate(read(file, folder).decode().splitlines(), start=1):
        identifier, rating, text = _fields(line, f"{file.member}: line {number}")
        if abs(rating) >= LEAST_RATING and text:
            rows.append((identifier, rating, text))
    rows.sort(key=lambda row: hashlib.sha256(row[0].encode()).digest())
    if config.limit:
        rows = rows[: config.limit]
    texts = [text for _, _, text in rows]
    labels = [CLASSES[int(rating > 0)] for _, rating, _ in rows]
    if config.group == "document":  # an identifier is DOCUMENT_NUMBER, or a number where each text stands alone
        groups = [f"{config.domain}:{identifier.partition('_')[0]}" for identifier, _, _ in rows]
    else:
        groups = [content_group(text) for text in texts]
    check_texts(texts, file.member)
    check_labels(labels, file.member)
    return Samples("text", texts, labels, groups)


def _fields(line: str, where: str) -> tuple[str, float, str]:
    try:
        identifier, rating, text = line.split("\t", 2)
        return identifier, float(rating), text.strip()
    except ValueError:
        raise invalid(f"{where}: expected identifier, rating and text") from None
