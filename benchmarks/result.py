"""How a benchmark ends."""

import json
from pathlib import Path
from typing import Any

__all__ = ["tell"]


def tell(document: Any, path: Path | None) -> None:
    """Prints the figures, and writes them to a file if one was asked for."""
    text = json.dumps(document, indent=2)
    if path:
        path.write_text(text + "\n")
    print(text)
