"""The updates of a round, as a fold reads them."""

from collections.abc import Callable, Iterator, Sequence

from aggregator.rounds.records import Input
from aggregator.strategies import Update
from veilfed.errors import Code, VeilfedError
from veilfed.wire.tensors import parse_map

__all__ = ["Damaged", "Updates"]


class Damaged(Exception):  # noqa: N818
    """Updates that are not what was kept."""

    def __init__(self, institutions: list[str]) -> None:
        super().__init__()
        self.institutions = institutions


class Updates:
    """The updates of a fold, read one at a time and as often as they are gone through."""

    def __init__(self, items: Sequence[Input], read: Callable[[Input], bytes]) -> None:
        self._items, self._read = items, read
        # Institutions whose updates are not what was kept.
        self.damaged: set[str] = set()

    def __iter__(self) -> Iterator[Update]:
        for item in self._items:
            try:
                arrays = parse_map(self._read(item))
            except VeilfedError as error:
                if error.code is not Code.ARTIFACT_INVALID:
                    raise
                self.damaged.add(item.institution)
            else:
                yield item.institution, item.weight, arrays
