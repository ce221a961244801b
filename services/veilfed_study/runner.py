"""Runs the cells of a study, one after the other; those that were finished before are read from their files."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from veilfed_study.cells import Cell, digests, job_of, measured
from veilfed_study.methods import Settings
from veilfed_study.parts import split_parts
from veilfed_study.store import Store, key_of
from veilfed_study.subjects import Subject

__all__ = ["Results", "cells", "run"]

# Changes when the figures of a cell are measured in another way.
FORM = 2

Results = dict[Cell, dict[str, Any]]


def cells(subject: Subject, methods: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """All jobs: each method, seed and domain that is held out."""
    for method in methods:
        for seed in seeds:
            for held_out in subject.domains:
                yield Cell(method, seed, held_out)


def run(
    subject: Subject,
    methods: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    store: Store,
    ended: Callable[[Cell, bool], None] = lambda cell, kept: None,
) -> Results:
    """The figures of all cells, as `cells.measured` has them. `ended` is told each, and whether it was there before.

    All jobs are checked before the first is run. Raises VeilfedError: JOB_INVALID, DATA_INVALID, UPDATE_INVALID,
    FILE_UNUSABLE.
    """
    names = list(subject.domains)
    wanted = list(cells(subject, methods, seeds))
    jobs = {
        cell: job_of(
            subject,
            cell.method,
            settings.of(cell.method),
            cell.seed,
            [name for name in names if name != cell.held_out],
            [cell.held_out],
        )
        for cell in wanted
    }
    parts = {seed: split_parts(subject.domains, subject.classes, settings.split_of(seed)) for seed in seeds}
    data = digests(subject, jobs.values())
    results: Results = {}
    for cell in wanted:
        key = key_of(
            FORM,
            data[jobs[cell].strategy.takes_class_vectors],
            settings.split_of(cell.seed),
            jobs[cell].model_dump(mode="json"),
        )
        found = store.get(cell.name, key)
        kept = found is not None
        if found is None:
            found = measured(subject, jobs[cell], parts[cell.seed])
            store.put(cell.name, key, found)
        results[cell] = found
        ended(cell, kept)
    return results
