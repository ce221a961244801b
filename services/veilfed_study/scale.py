"""How a method fares with many small clients: the samples of all domains but one are divided among many.

Rows keep the side, training or test, that the split of their domain gives them, so that no client trains on a group
that the held-out domain is tested on. The clients are made once for each seed and domain that is held out, and put in
an order; of them the first 1, 5, ... take part, so more clients also have more data in all. G is the accuracy on the
held-out domain with the model alone, P the mean over the clients that take part, each with its own state on its own
test rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from client_agent.data.partition import by_domain, dirichlet
from client_agent.data.source import Samples
from client_agent.trainers import method_for
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed_study import measures, simulation
from veilfed_study.cells import digests, job_of, shown_settings
from veilfed_study.methods import METHODS, Settings
from veilfed_study.parts import Domain, Part, Parts, split_parts
from veilfed_study.store import Store, key_of
from veilfed_study.subjects import Subject
from veilfed_study.summary import spread

__all__ = ["Division", "clients_of", "pooled", "scale"]

FORM = 2

Split = Literal["dirichlet", "by-domain"]


@dataclass(frozen=True)
class Division:
    """How samples are divided; `alpha` is for Dirichlet alone."""

    split: Split
    alpha: float = 0.5

    @classmethod
    def named(cls, split: str, alpha: float) -> "Division":
        """Raises VeilfedError(INPUT_INVALID)."""
        if split == "by-domain":
            return cls("by-domain")
        if split == "dirichlet":
            return cls("dirichlet", alpha)
        raise VeilfedError(Code.INPUT_INVALID, f"there is no division {split!r}; there are by-domain and dirichlet")


def clients_of(parts: Sequence[Part], count: int, division: Division, seed: int) -> tuple[dict[str, Part], int]:
    """`count` clients that have the samples of these domains, in a random order; and how many were left out.

    A client without a training or without a test row is left out, as its agent would refuse; then more are made, with
    fewer samples each, until so many are left. Raises VeilfedError: INPUT_INVALID or DATA_INVALID where the samples
    cannot be divided so.
    """
    for number in range(count, 2 * count + 1):
        made = _divided(parts, number, division, seed)
        usable = [part for part in made if len(part.train) and len(part.held)]
        if len(usable) >= count:
            break
    else:
        raise VeilfedError(
            Code.DATA_INVALID, f"the samples are too few for {count} clients that have training and test rows"
        )
    order = np.random.default_rng(seed).permutation(len(usable))[:count]
    width = len(str(count))
    clients = {f"client-{place:0{width}}": usable[number] for place, number in enumerate(order, start=1)}
    return clients, len(made) - len(usable)


def _divided(parts: Sequence[Part], count: int, division: Division, seed: int) -> list[Part]:
    if division.split == "by-domain":
        divided = by_domain([part.domain.samples.groups for part in parts], count, seed)
        return [_subset(parts[place], rows) for place, rows in divided]
    whole = pooled(parts)
    samples = whole.domain.samples
    return [_subset(whole, rows) for rows in dirichlet(samples.labels, samples.groups, count, division.alpha, seed)]


def pooled(parts: Sequence[Part]) -> Part:
    """All rows of several parts as those of one domain.

    A group is one of its domain: those of the same name elsewhere (an icon in another style) may go to another client,
    as they are on the same side of the split.
    """
    domains = [part.domain for part in parts]
    samples = [domain.samples for domain in domains]
    inputs: Any = [value for part in samples for value in part.inputs]
    labels = [label for part in samples for label in part.labels]
    groups = [f"{place}:{group}" for place, part in enumerate(samples) for group in part.groups]
    starts = np.cumsum([0, *(len(domain.labels) for domain in domains)])
    return Part(
        Domain(
            Samples(samples[0].modality, inputs, labels, groups),
            np.concatenate([domain.features for domain in domains]),
            np.concatenate([domain.labels for domain in domains]),
        ),
        np.concatenate([part.train + start for part, start in zip(parts, starts, strict=False)]),
        np.concatenate([part.held + start for part, start in zip(parts, starts, strict=False)]),
    )


def _subset(part: Part, rows: NDArray[np.intp]) -> Part:
    """Some rows of a part, each on its side."""
    return Part(part.domain, rows[np.isin(rows, part.train)], rows[np.isin(rows, part.held)])


def scale(
    subject: Subject,
    methods: Sequence[str],
    seeds: Sequence[int],
    counts: Sequence[int],
    division: Division,
    settings: Settings,
    store: Store,
    ended: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """G and P for each method and number of clients: mean and spread over the seeds.

    All jobs are checked before the first is run. Raises VeilfedError: what `clients_of` and `runner.run` say.
    """
    whole = {seed: split_parts(subject.domains, subject.classes, settings.split_of(seed)) for seed in seeds}
    made = {
        (seed, held_out): clients_of(_others(whole[seed], held_out), max(counts), division, seed)
        for seed in seeds
        for held_out in subject.domains
    }
    jobs = {
        (method, count, seed, held_out): job_of(
            subject, method, settings.of(method), seed, list(clients)[:count], [held_out]
        )
        for (seed, held_out), (clients, _) in made.items()
        for method in methods
        for count in counts
    }
    data = digests(subject, jobs.values())
    found: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for (method, count, seed, held_out), job in jobs.items():
        clients, _ = made[seed, held_out]
        name = f"{division.split}-{method}-{seed}-{count}-without-{held_out}"
        key = key_of(
            FORM,
            data[job.strategy.takes_class_vectors],
            settings.split_of(seed),
            max(counts),
            vars(division),
            job.model_dump(mode="json"),
        )
        kept = store.get(name, key)
        if kept is None:
            train = {client: clients[client] for client in job.cohort.train}
            kept = _figures(subject, job, train, whole[seed][held_out], METHODS[method].generalises)
            store.put(name, key, kept)
        found.setdefault((method, count, seed), []).append(kept)
        ended(method)
    return {
        "study": "scale",
        "task": subject.name,
        "seeds": list(seeds),
        "split": division.split + (f", alpha {division.alpha:g}" if division.split == "dirichlet" else ""),
        "clients": list(counts),
        "left_out": float(np.mean([out for _, out in made.values()])),
        "rows": float(np.mean([len(part.train) for clients, _ in made.values() for part in clients.values()])),
        "settings": {
            METHODS[method].label: shown_settings(jobs[method, counts[0], seeds[0], next(iter(subject.domains))])
            for method in methods
        },
        "methods": {
            METHODS[method].label: [
                {name: spread([_mean(found[method, count, seed], name) for seed in seeds]) for name in ("G", "P")}
                for count in counts
            ]
            for method in methods
        },
    }


def _others(parts: Parts, held_out: str) -> list[Part]:
    return [part for name, part in parts.items() if name != held_out]


def _figures(subject: Subject, job: JobSpec, train: Parts, test: Part, generalises: bool) -> dict[str, Any]:
    """G and P of one job; without G for a method that has nothing for newcomers."""
    (held_out,) = job.cohort.evaluate
    parts = {**train, held_out: test}
    vectors = subject.class_vectors() if job.strategy.takes_class_vectors else None
    *_, last = simulation.rounds(job, parts, vectors)
    values = measures.accuracies(method_for(job.strategy), last.model, last.states, parts)
    general = values.pop(held_out)
    return {"G": general if generalises else None, "P": float(np.mean(list(values.values())))}


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """NaN if a value is missing."""
    return float(np.mean([np.nan if row[name] is None else row[name] for row in rows]))
