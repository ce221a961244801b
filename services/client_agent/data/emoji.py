"""Emoji-DG: 280 icons of 10 classes, drawn in five styles; a small set for domain generalisation.

The drawings are in the npm packages @iconify-json/*, as SVG: Noto (Apache-2.0), Twemoji (CC BY 4.0), OpenMoji
(CC BY-SA 4.0), Fluent (MIT), Fluent high contrast (MIT). `emoji_dg.csv` says which icons belong to which class.
"""

import csv
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import resvg_py

from client_agent.data.config import EmojiConfig
from client_agent.data.samples import Samples, check_labels, invalid
from veilfed.packages import PackageFile, read

__all__ = ["FILES", "concepts", "load"]

SIDE = 112  # pixels


def _file(name: str, version: str, sha256: str) -> PackageFile:
    return PackageFile("npm", f"@iconify-json/{name}", version, "package/icons.json", sha256)


FILES = {
    "noto": _file("noto", "1.2.9", "9eac6ef4e7ec122b6f0e7ac281d61008afdbc720d0ce861e398b939daaa347c6"),
    "twemoji": _file("twemoji", "1.2.5", "5d5d820790565b764f2728675d487c9ee4c1fc83916d8567d5aca8ba7527c242"),
    "openmoji": _file("openmoji", "1.2.29", "7075331faab544067dbff4236471dd378bb5410aa05799a8a343c9ebf5c5984c"),
    "fluent-emoji": _file("fluent-emoji", "1.2.7", "87f3336be6f46747d40d046a15ffa8b23809ff7a1a280b5d3521d3782fb85de7"),
    "fluent-emoji-high-contrast": _file(
        "fluent-emoji-high-contrast", "1.2.6", "c522fb74fef65ccef67b38dfdbf0f3dcd4353339e4b8faec4aa45faf83ed4739"
    ),
}


def concepts() -> list[tuple[str, str]]:
    """(icon name, class) of all 280 concepts."""
    text = files("client_agent.data").joinpath("emoji_dg.csv").read_text(encoding="utf-8")
    return [(row["concept"], row["class"]) for row in csv.DictReader(text.splitlines())]


def load(config: EmojiConfig, folder: Path) -> Samples:
    """All concepts in one style as PNG, 112 px, black or coloured on white; the group is the concept."""
    file = FILES[config.style]
    document: dict[str, Any] = json.loads(read(file, folder))
    rows = concepts()
    images = []
    for concept, _ in rows:
        try:
            images.append(_draw(document, concept))
        except (KeyError, ValueError):
            raise invalid(f"{file.release}: the icon {concept} is missing or cannot be drawn") from None
    labels = [label for _, label in rows]
    check_labels(labels, file.release)
    return Samples("image", images, labels, [concept for concept, _ in rows])


def _draw(document: dict[str, Any], concept: str) -> bytes:
    """An icon as PNG. Sizes that an icon does not give are those of the set, and else 16 (the Iconify format)."""
    icon = document["icons"][concept]
    width, height = (icon.get(key, document.get(key, 16)) for key in ("width", "height"))
    body = icon["body"].replace("currentColor", "black")
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{icon.get("left", 0)} {icon.get("top", 0)} {width} {height}" color="black">{body}</svg>'
    )
    png: bytes = resvg_py.svg_to_bytes(
        svg_string=svg, width=SIDE, height=SIDE, background="white", skip_system_fonts=True
    )
    return bytes(png)
