"""What several commands of `veilfed study` take: the data and the model, and lists of numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer

from veilfed import packages
from veilfed.cli import output
from veilfed.errors import Code, VeilfedError

if TYPE_CHECKING:
    from veilfed_study.subjects import Subject

__all__ = [
    "Cache",
    "Choice",
    "Out",
    "Packages",
    "Seeds",
    "choice",
    "counts",
    "embedding",
    "numbers",
    "one_thread",
    "seeds",
]

Characters = Literal["all", "digits"]
Number = TypeVar("Number", int, float)

Seeds = Annotated[str, typer.Option("--seeds", help="Each seed is a whole study; figures are means over them.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of results; what is finished there is not computed again.")]
Packages = Annotated[Path | None, typer.Option("--packages", help="Where public models and data are kept.")]
Cache = Annotated[Path | None, typer.Option("--cache", help="Where embeddings are kept.")]


@dataclass(frozen=True)
class Choice:
    """What is studied, as the command line says it; `packages` and `cache` are set."""

    task: str | None
    data: Path | None
    fm: str | None
    set_name: str | None
    institutions: int | None
    characters: Characters | None
    prompts: Path | None
    packages: Path
    cache: Path

    def subject(self, domains: bool = True) -> "Subject":
        """Loads it, and embeds what is not in the cache.

        Errors as in `subjects`, and INPUT_INVALID for a benchmark without domains where `domains` are needed.
        """
        from client_agent.class_vectors import read_prompts  # noqa: PLC0415
        from client_agent.data.benchmark_sets import BENCHMARK_SETS  # noqa: PLC0415
        from veilfed_study import subjects  # noqa: PLC0415

        if domains and self.set_name in BENCHMARK_SETS:
            raise VeilfedError(
                Code.INPUT_INVALID, f"{self.set_name} has no domains to leave out", "It is for veilfed study analytic."
            )
        one_thread()
        with embedding() as progress:
            if self.task is not None:
                return subjects.of_task(self.task, self.packages, self.cache, progress)
            return subjects.of_folder(
                cast(Path, self.data),
                cast(str, self.fm),
                self.packages,
                self.cache,
                set_name=self.set_name,
                institutions=self.institutions,
                characters=self.characters,
                prompts=read_prompts(self.prompts) if self.prompts else None,
                progress=progress,
            )


def choice(
    task: Annotated[str | None, typer.Option("--task", help="vader, emoji or heart.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="A folder of images, DOMAIN/CLASS/FILE.")] = None,
    fm: Annotated[str | None, typer.Option("--fm", help="The model for --data, such as open_clip:ViT-B-32.")] = None,
    set_name: Annotated[
        str | None,
        typer.Option(
            "--set",
            help="What --data is: pacs, vlcs, office-home, terra-incognita, femnist, cifar-10, cifar-100, svhn or dtd.",
        ),
    ] = None,
    institutions: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Among how many femnist is divided.")
    ] = None,
    characters: Annotated[Characters | None, typer.Option(help="Of femnist: all, or the ten digits alone.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="Prompts for the classes of --data (YAML).")] = None,
    packages_folder: Packages = None,
    cache: Cache = None,
) -> Choice:
    """The options that say what is studied. Raises VeilfedError(INPUT_INVALID) for some that do not go together."""
    if (task is None) == (data is None):
        raise VeilfedError(Code.INPUT_INVALID, "say what to study: --task NAME, or --data FOLDER --fm MODEL")
    of_data = {
        "--fm": fm,
        "--set": set_name,
        "--institutions": institutions,
        "--characters": characters,
        "--prompts": prompts,
    }
    idle = [name for name, value in of_data.items() if value is not None]
    if task is not None and idle:
        raise VeilfedError(Code.INPUT_INVALID, f"{idle[0]} is for --data; a task has its own")
    if data is not None and fm is None:
        raise VeilfedError(Code.INPUT_INVALID, "--data needs --fm, the model that embeds it")
    where = packages_folder or packages.default_folder()
    kept = cache or where.parent / "embeddings"
    return Choice(task, data, fm, set_name, institutions, characters, prompts, where, kept)


@contextmanager
def embedding() -> Iterator[Any]:
    """A bar for what a model computes."""
    with output.progress() as bars:
        bar = bars.add_task("loading", total=1)
        yield lambda what, done, total: bars.update(bar, description=what, completed=done, total=total)


def one_thread() -> None:
    """As the agents have: sums in another order give other bytes."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)


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


def seeds(text: str, what: str = "--seeds") -> list[int]:
    """Raises VeilfedError(INPUT_INVALID)."""
    found = numbers(text, int, what)
    if not all(0 <= seed < 2**31 for seed in found):
        raise VeilfedError(Code.INPUT_INVALID, f"{what} takes distinct whole numbers, such as 50,77,98")
    return found
