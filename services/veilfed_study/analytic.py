"""One shot against many rounds: the methods that solve in closed form beside those that are trained, on many clients.

The training rows of all domains together are divided among clients, with class shares from Dirichlet(alpha); every
method gets the same clients, and is tested on the test rows of all domains. A benchmark has its own training and test
rows.

    accuracy    fraction of right answers on the test rows, with the model alone: what a newcomer gets
    own         mean over the clients of the accuracy that each expects on its own mix of classes, with its private
                state if it has one: sum_c p_k(c) a_k(c), with the share p_k(c) of class c in its training rows and the
                accuracy a_k(c) on the test rows of class c
    gaps        accuracy of one variant minus that of another, with its interval (`resampling`)

FedOPAL's features are made by the model anew, with each client's prompts; all others have the same cached ones.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from client_agent.data.partition import dirichlet
from veilfed.config import validate
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed_study.backbone import Backbone
from veilfed_study.cells import job_of, shown_settings
from veilfed_study.methods import Settings
from veilfed_study.parts import Part, Parts, split_parts
from veilfed_study.prompted import inputs_of
from veilfed_study.resampling import drawn, interval
from veilfed_study.scale import pooled
from veilfed_study.shots import measured
from veilfed_study.store import Store, key_of
from veilfed_study.subjects import Subject
from veilfed_study.summary import spread
from veilfed_study.variants import ONE_SHOT, Grid, Tuning, Variant, variants

__all__ = ["clients_of", "job_for", "some_of", "study", "whole_of"]

# Changes when the figures of a job are measured in another way.
FORM = 2

Place = tuple[int, float, int]  # clients, alpha, seed


def whole_of(subject: Subject, split: int) -> Part:
    """The rows of all domains, divided into training and test by this seed, or as a benchmark has them."""
    if subject.test_domain is None:
        return pooled(list(split_parts(subject.domains, subject.classes, split).values()))
    parts = []
    for name, domain in subject.domains.items():
        rows, none = np.arange(len(domain.labels), dtype=np.intp), np.empty(0, np.intp)
        parts.append(Part(domain, none, rows) if name == subject.test_domain else Part(domain, rows, none))
    return pooled(parts)


def some_of(whole: Part, rows: int | None, seed: int) -> Part:
    """So many training rows, drawn by the seed, and test rows in the same proportion; None or more than all: all."""
    if rows is None or rows >= len(whole.train):
        return whole
    rng = np.random.default_rng(seed)
    tested = max(1, round(len(whole.held) * rows / len(whole.train)))
    train, held = (
        np.sort(rng.permutation(side)[:count]) for side, count in ((whole.train, rows), (whole.held, tested))
    )
    return Part(whole.domain, train, held)


def clients_of(whole: Part, count: int, alpha: float, seed: int) -> dict[str, Part]:
    """`count` clients among which the training rows are divided; each is to be tested on all test rows.

    Raises VeilfedError: INPUT_INVALID or DATA_INVALID where the rows cannot be divided so.
    """
    samples, train = whole.domain.samples, whole.train
    labels, groups = [samples.labels[row] for row in train], [samples.groups[row] for row in train]
    width = len(str(count))
    return {
        f"client-{place:0{width}}": Part(whole.domain, train[rows], whole.held)
        for place, rows in enumerate(dirichlet(labels, groups, count, alpha, seed), start=1)
    }


def study(
    subject: Subject,
    methods: Sequence[str],
    seeds: Sequence[int],
    grid: Grid,
    settings: Settings,
    store: Store,
    ended: Callable[[str], None] = lambda what: None,
    rows: int | None = None,
) -> dict[str, Any]:
    """Everything that was measured, as JSON; jobs that were finished before are read from their files.

    `rows` is how many training rows there are, see `some_of`. All divisions and jobs are made before the first is run.
    Raises VeilfedError: DATA_INVALID, INPUT_INVALID (also for FedOPAL with a model that takes no prompts), JOB_INVALID,
    UPDATE_INVALID for training that diverged.
    """
    chosen, data = variants(methods, grid), subject.digest()
    wholes = {
        seed: some_of(whole_of(subject, settings.split_of(seed)), rows, settings.split_of(seed)) for seed in seeds
    }
    places = [(count, alpha, seed) for count in grid.clients for alpha in grid.alphas for seed in seeds]
    divided = {place: clients_of(wholes[place[2]], *place) for place in places}
    jobs = {
        (variant, place): job_for(subject, variant, settings, place[2], list(divided[place]))
        for place in places
        for variant in chosen
    }
    files = _Files(subject, data, settings, store, rows, grid.tunings[0])
    results: dict[tuple[Variant, Place], dict[str, Any]] = {}
    for place in places:
        for variant in chosen:
            results[variant, place] = files.result(variant, place, jobs[variant, place], divided[place])
            ended(variant.label)
        if subject.backbone is not None:
            subject.backbone.forget()
    whole = wholes[seeds[0]]
    return {
        "study": "analytic",
        "task": subject.name,
        "title": subject.title,
        "model": subject.model,
        "dimension": subject.dimension,
        "classes": list(subject.classes),
        "rows": {"training": len(whole.train), "test": len(whole.held)},
        "embedding": _embedding(subject.backbone, whole, store, data) if "fedopal" in methods else None,
        "seeds": list(seeds),
        "split": settings.split,
        "clients": list(grid.clients),
        "alphas": list(grid.alphas),
        "variants": [
            {
                "name": variant.name,
                "label": variant.label,
                "method": variant.method,
                "ridge": variant.ridge,
                "min_class_samples": variant.least,
                "tuning": None if variant.tuning is None else variant.tuning.name,
                "reextract": variant.reextract,
                "settings": shown_settings(jobs[variant, places[0]]),
                "cells": [_cell([results[variant, (*pair, seed)] for seed in seeds], *pair) for pair in _pairs(grid)],
            }
            for variant in chosen
        ],
        "gaps": [
            {
                "clients": pair[0],
                "alpha": pair[1],
                "of": _gaps(
                    list(wholes.values()),
                    {variant.name: [results[variant, (*pair, seed)]["hits"] for seed in seeds] for variant in chosen},
                    settings.split_of(seeds[0]),
                ),
            }
            for pair in _pairs(grid)
        ],
    }


@dataclass(frozen=True)
class _Files:
    """The files of a study's jobs. `data` is the subject's digest; of FedOPAL's tunings only `first` has `own`."""

    subject: Subject
    data: str
    settings: Settings
    store: Store
    rows: int | None
    first: Tuning

    def result(self, variant: Variant, place: Place, job: JobSpec, clients: Parts) -> dict[str, Any]:
        """What was measured of a job, from its file if it was finished before."""
        count, alpha, seed = place
        own = variant.tuning in {None, self.first}
        name = f"{variant.name}-{seed}-{count}-{alpha:g}"
        key = key_of(
            FORM,
            self.data,
            self.subject.test_domain,
            self.settings.split_of(seed),
            alpha,
            variant.least,
            self.rows,
            own,
            job.model_dump(mode="json"),
        )
        found = self.store.get(name, key)
        if found is None:
            found = measured(job, clients, variant.least, self.subject.backbone, own)
            self.store.put(name, key, found)
        return found


def _pairs(grid: Grid) -> Iterator[tuple[int, float]]:
    return ((count, alpha) for count in grid.clients for alpha in grid.alphas)


def _cell(results: Sequence[dict[str, Any]], count: int, alpha: float) -> dict[str, Any]:
    """The figures of one place of the grid: accuracies over the seeds, and costs."""
    first = results[0]
    by_round = zip(*(result["by_round"] for result in results), strict=True)
    return {
        "clients": count,
        "alpha": alpha,
        **{name: spread([_number(result[name]) for result in results]) for name in ("accuracy", "own")},
        "by_round": [spread([_number(value) for value in values])["mean"] for values in by_round],
        **{name: first[name] for name in ("rounds", "bytes_sent", "bytes_received")},
        **{
            name: float(np.mean([result[name] for result in results]))
            for name in ("samples_used", "inputs", "gradients")
        },
        **{
            name: round(float(np.mean([result[name] for result in results])), 3)
            for name in ("seconds", "model_seconds")
        },
    }


def _number(value: float | None) -> float:
    """NaN where there is none."""
    return float("nan") if value is None else value


def _gaps(
    wholes: Sequence[Part], hits: Mapping[str, Sequence[str | None]], seed: int
) -> dict[str, dict[str, list[float]]]:
    """one -> other -> the mean of one - other and the ends of its interval, of those that have an accuracy.

    A group is an icon or a text, in whatever domain: test rows of one group have one weight in a draw.
    """
    known = {
        name: [[{"all": [int(hit) for hit in row]}] for row in rows if row is not None]
        for name, rows in hits.items()
        if None not in rows
    }
    parts = [{"all": _ungrouped(whole)} for whole in wholes]
    draws = {name: matrices[:, 0, 0] for name, matrices in drawn(parts, known, seed).items()} if known else {}
    means = {name: np.mean([np.mean(row[0]["all"]) for row in rows]) for name, rows in known.items()}
    return {
        one: {
            other: [float(means[one] - means[other]), *interval(mine, theirs)]
            for other, theirs in draws.items()
            if other != one
        }
        for one, mine in draws.items()
    }


def _ungrouped(whole: Part) -> Part:
    """With the groups' names as their domains have them (`scale.pooled` puts a number before them)."""
    samples = whole.domain.samples
    names = [group.partition(":")[2] for group in samples.groups]
    return Part(replace(whole.domain, samples=replace(samples, groups=names)), whole.train, whole.held)


def _embedding(backbone: Backbone | None, whole: Part, store: Store, data: str) -> dict[str, Any] | None:
    """What it costs to embed the training rows once, without prompts: all other methods have paid that."""
    if backbone is None:
        return None
    key = key_of(FORM, data, whole.train.tolist())
    kept = store.get("embedding", key)
    if kept is None:
        before = backbone.asked
        backbone.embed(inputs_of(whole, whole.train), None)
        backbone.forget()
        kept = asdict(backbone.asked.since(before))
        store.put("embedding", key, kept)
    return kept


def job_for(subject: Subject, variant: Variant, settings: Settings, seed: int, clients: list[str]) -> JobSpec:
    """Raises VeilfedError: JOB_INVALID; INPUT_INVALID for FedOPAL with a model that takes no prompts."""
    if variant.method not in ONE_SHOT:
        return job_of(subject, variant.method, settings.of(variant.method), seed, clients, [])
    strategy = {**variant.strategy, "classes": list(subject.classes), "dimension": subject.dimension}
    if variant.tuning is not None:
        if subject.backbone is None:
            raise VeilfedError(Code.INPUT_INVALID, f"fedopal: the model {subject.model} takes no prompts")
        strategy["prompt_width"] = subject.backbone.prompt_width
    document = {
        "name": f"{subject.name}-{variant.method}-{seed}",
        "strategy": strategy,
        "cohort": {"train": clients},
        "rounds": 2 if variant.reextract else 1,
        "quorum": len(clients),
        "seed": seed,
    }
    return validate(JobSpec, json.dumps(document), f"method {variant.method}", Code.JOB_INVALID)
