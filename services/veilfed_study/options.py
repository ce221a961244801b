"""Values of the command line that several commands of `veilfed study` take."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from veilfed.errors import Code, VeilfedError

__all__ = ["Cache", "Out", "Packages", "Seeds", "counts", "numbers", "seeds"]

Number = TypeVar("Number", int, float)

Seeds = Annotated[str, typer.Option("--seeds", help="Each seed is a whole study; figures are means over them.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of results; what is finished there is not computed again.")]
Packages = Annotated[Path | None, typer.Option("--packages", help="Where public models and data are kept.")]
Cache = Annotated[Path | None, typer.Option("--cache", help="Where embeddings are kept.")]


def numbers(text: str, kind: Callable[[str], Number], what: str) -> list[Number]:
    """Distinct numbers of a list such as "1,2,3". Raises VeilfedError(INPUT_INVALID)."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or len(set(found)) != len(found):
        raise VeilfedError(Code.INPUT_INVALID, f"{what} takes distinct numbers with commas between them")
    return found


def counts(text: str, what: str) -> list[int]:
    """Whole numbers from 1 on. Raises VeilfedError(INPUT_INVALID)."""
    found = numbers(text, int, what)
    if min(found) < 1:
        raise VeilfedError(Code.INPUT_INVALID, f"{what} takes whole numbers from 1 on")
    return found


def seeds(text: str) -> list[int]:
    """Raises VeilfedError(INPUT_INVALID)."""
    found = numbers(text, int, "--seeds")
    if not all(0 <= seed < 2**31 for seed in found):
        raise VeilfedError(Code.INPUT_INVALID, "--seeds takes distinct whole numbers, such as 50,77,98")
    return found
