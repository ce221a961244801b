"""The updates of a round as a fold reads them, and the fold of plain ones. Blocks: call it off the event loop."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from aggregator.artifacts import Artifacts
from aggregator.rounds.book import Job
from aggregator.rounds.records import Input, Inputs
from aggregator.strategies import Report, Update, with_ridge
from veilfed.errors import Code, VeilfedError
from veilfed.wire.tensors import Arrays, digest, parse_map

__all__ = ["Damaged", "Updates", "fold_plain"]


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


def fold_plain(artifacts: Artifacts, job: Job, number: int, inputs: Inputs) -> tuple[Arrays, Report]:
    """The next model, and what is to be told of it. Raises Damaged, and VeilfedError as the strategy's fold."""
    strategy = with_ridge(job.spec, inputs.ridge) if inputs.ridge else job.strategy
    where = None if strategy.sealed else number
    updates = Updates(inputs.updates, partial(_kept, artifacts, job.id, where))
    try:
        return strategy.fold_reported(updates, lambda: parse_map(artifacts.model(inputs.start)))
    finally:
        if updates.damaged:
            raise Damaged(sorted(updates.damaged))


def _kept(artifacts: Artifacts, job_id: str, number: int | None, item: Input) -> bytes:
    """A round's update, or a sealed one. Raises VeilfedError(ARTIFACT_INVALID) when it is missing or damaged."""
    if item.parameters is None:
        return artifacts.update(job_id, number, item.institution, item.sha256)
    if digest(item.parameters) != item.sha256:
        raise VeilfedError(Code.ARTIFACT_INVALID, f"update {item.sha256[:12]} is damaged")
    return item.parameters
