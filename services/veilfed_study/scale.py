"""How a method fares with many small clients: the samples of all domains but one are divided among many.

The clients of the largest number are made once for each seed and domain that is held out, and put in an order; of them
the first 1, 5, ... take part, so more clients also have more data in all. G is the accuracy on the held-out domain with
the model alone, P the mean over the clients that take part, each with its own state on its own test split.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from client_agent.data.partition import by_domain, dirichlet
from client_agent.data.source import Samples
from client_agent.trainers import method_for
from veilfed.errors import Code, VeilfedError
from veilfed_study import measures, simulation
from veilfed_study.cells import job_of
from veilfed_study.methods import METHODS, Settings
from veilfed_study.parts import Domain, Part, split_parts
from veilfed_study.store import Store, key_of
from veilfed_study.subjects import Subject
from veilfed_study.summary import spread

__all__ = ["Division", "clients_of", "scale"]

FORM = 1

Split = Literal["dirichlet", "by-domain"]


@dataclass(frozen=True)
class Division:
    """How samples are divided; `alpha` is for Dirichlet alone."""

    split: Split
    alpha: float = 0.5


def clients_of(subject: Subject, held_out: str, count: int, division: Division, seed: int) -> dict[str, Domain]:
    """So many clients with the samples of all domains but one, in a random order.

    Raises VeilfedError: INPUT_INVALID or DATA_INVALID where the samples cannot be divided so.
    """
    others = [domain for name, domain in subject.domains.items() if name != held_out]
    if division.split == "by-domain":
        found = [
            _subset(others[place], rows)
            for place, rows in by_domain([domain.samples.groups for domain in others], count, seed)
        ]
    else:
        pooled = _pooled(others)
        samples = pooled.samples
        found = [
            _subset(pooled, rows) for rows in dirichlet(samples.labels, samples.groups, count, division.alpha, seed)
        ]
    order = np.random.default_rng(seed).permutation(count)
    width = len(str(count))
    return {f"client-{number:0{width}}": found[place] for number, place in enumerate(order, start=1)}


def _pooled(domains: Sequence[Domain]) -> Domain:
    samples = [domain.samples for domain in domains]
    inputs: Any = [value for part in samples for value in part.inputs]
    labels = [label for part in samples for label in part.labels]
    groups = [group for part in samples for group in part.groups]
    return Domain(
        Samples(samples[0].modality, inputs, labels, groups),
        np.concatenate([domain.features for domain in domains]),
        np.concatenate([domain.labels for domain in domains]),
    )


def _subset(domain: Domain, rows: Any) -> Domain:
    samples = domain.samples
    inputs: Any = [samples.inputs[row] for row in rows]
    return Domain(
        Samples(samples.modality, inputs, [samples.labels[row] for row in rows], [samples.groups[row] for row in rows]),
        domain.features[rows],
        domain.labels[rows],
    )


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

    A client whose samples are too few for a training and a test split is left out, as its agent would refuse; `left
    out` counts them. Raises VeilfedError: INPUT_INVALID, and what `runner.run` says.
    """
    if min(counts) < 1:
        raise VeilfedError(Code.INPUT_INVALID, "clients: at least one is needed")
    data = subject.digest()
    found: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for seed in seeds:
        test = split_parts(subject.domains, subject.classes, seed)
        for held_out in subject.domains:
            clients, out = _usable(subject, clients_of(subject, held_out, max(counts), division, seed), seed)
            for method in methods:
                for count in counts:
                    train = {name: clients[name] for name in list(clients)[:count]}
                    job = job_of(subject, method, settings.of(method), seed, list(train), [held_out])
                    name = f"{division.split}-{method}-{seed}-{count}-without-{held_out}"
                    key = key_of(FORM, data, max(counts), vars(division), job.model_dump(mode="json"))
                    kept = store.get(name, key)
                    if kept is None:
                        parts = {**train, held_out: test[held_out]}
                        vectors = subject.class_vectors() if METHODS[method].class_vectors else None
                        *_, last = simulation.rounds(job, parts, vectors)
                        values = measures.accuracies(method_for(job.strategy), last.model, last.states, parts)
                        general = values.pop(held_out)
                        kept = {"G": general, "P": float(np.mean(list(values.values()))), "left_out": out}
                        store.put(name, key, kept)
                    found.setdefault((method, count, seed), []).append(kept)
                    ended(method)
    return {
        "study": "scale",
        "task": subject.name,
        "seeds": list(seeds),
        "split": division.split + (f", alpha {division.alpha:g}" if division.split == "dirichlet" else ""),
        "clients": list(counts),
        "left_out": float(np.mean([kept["left_out"] for rows in found.values() for kept in rows])),
        "settings": {method: settings.of(method).model_dump(mode="json") for method in methods},
        "methods": {
            METHODS[method].label: [
                {
                    name: spread(
                        [float(np.mean([kept[name] for kept in found[method, count, seed]])) for seed in seeds]
                    )
                    for name in ("G", "P")
                }
                for count in counts
            ]
            for method in methods
        },
    }


def _usable(subject: Subject, clients: dict[str, Domain], seed: int) -> tuple[dict[str, Part], int]:
    """The parts of the clients that can be divided, and how many cannot."""
    parts: dict[str, Part] = {}
    for name, client in clients.items():
        try:
            parts |= split_parts({name: client}, subject.classes, seed)
        except VeilfedError as error:
            if error.code is not Code.DATA_INVALID:
                raise
    return parts, len(clients) - len(parts)
