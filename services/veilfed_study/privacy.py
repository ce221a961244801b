"""Accuracy against epsilon: the methods that a job can have with privacy, on few institutions and on many.

The rows of all domains are divided among institutions, each of which keeps the side, training or test, that the split
gives each row. With as many institutions as domains, each has its domain; with more, the domains are cut into pieces.

    accuracy    mean over the institutions of the fraction of right answers on its own test rows, with the model alone
    own         the same, with the institution's private state if it has one

For each epsilon the noise is the least with which the whole job spends no more, by the accountant.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from client_agent.trainers import method_for
from veilfed.config import validate
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.privacy import Release, epsilon
from veilfed_study import measures, simulation
from veilfed_study.parts import Parts, split_parts
from veilfed_study.scale import Division, clients_of
from veilfed_study.store import Store, key_of
from veilfed_study.subjects import Subject
from veilfed_study.summary import spread

__all__ = ["DELTA", "MECHANISMS", "Mechanism", "institutions_of", "multiplier", "named", "study", "targets"]

# Changes when the figures of a job are measured in another way.
FORM = 1

DELTA = 1e-5
LARGEST_MULTIPLIER = 8192.0


@dataclass(frozen=True)
class Mechanism:
    """A method with a mode of privacy. `strategy` and `privacy` are keys of its jobs that do not follow from others."""

    label: str
    strategy: Mapping[str, Any]
    privacy: Mapping[str, Any]
    rounds: int = 1
    # Whether the sum alone is seen, so that each institution adds its share of the noise only.
    shared: bool = False

    def ridge(self, institutions: int, dimension: int, noise_multiplier: float) -> float:
        """lambda: 1, and the largest eigenvalue of the noise in the sum of R."""
        added = 1 if self.shared else institutions
        return 1 + noise_multiplier * float(np.sqrt(6 * dimension * added))


# Chosen on a validation fold of the training rows of seed 50, VADER, at epsilon 1 and 4, before the study was run.
FEDOT = {"name": "fedot", "blocks": 24, "transform_rate": 0.0005}
UPDATE = {**FEDOT, "classifier_rate": 0.002, "epochs": 3}
SAMPLE = {**FEDOT, "classifier_rate": 0.005}
CLIPPED = {"mode": "update", "clip": 0.3}
STEPS = {"mode": "sample", "clip": 1.0, "sampling_rate": 0.1}
SUMS = {"mode": "statistics"}

MECHANISMS: dict[str, Mechanism] = {
    "afl": Mechanism("AFL, statistics", {"name": "afl"}, SUMS),
    "afl-sum": Mechanism("AFL, statistics, of the sum", {"name": "afl"}, SUMS, shared=True),
    "fedcgs": Mechanism("FedCGS, statistics", {"name": "fedcgs"}, SUMS),
    "fedot-sample": Mechanism("FEDOT(+B), sample", SAMPLE, STEPS, rounds=3),
    "fedot-update": Mechanism("FEDOT(+B), update", UPDATE, CLIPPED),
    "fedot-update-sum": Mechanism("FEDOT(+B), update, of the sum", UPDATE, CLIPPED, shared=True),
}


def named(names: str) -> list[str]:
    """The mechanisms of a list such as "afl,fedot-sample", or of "all". Raises VeilfedError(INPUT_INVALID)."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == ["all"]:
        return list(MECHANISMS)
    unknown = [name for name in wanted if name not in MECHANISMS]
    if unknown or not wanted:
        which = f"there is no mechanism {unknown[0]!r}" if unknown else "no mechanism is named"
        raise VeilfedError(Code.INPUT_INVALID, which, f"Mechanisms: all, {', '.join(MECHANISMS)}.")
    return [name for name in MECHANISMS if name in wanted]


def targets(values: Sequence[float]) -> list[float]:
    """The values of epsilon, largest first. Raises VeilfedError(INPUT_INVALID) for one that no noise gives."""
    if any(not 0.01 <= value <= 1000 for value in values):
        raise VeilfedError(Code.INPUT_INVALID, "--epsilons: between 0.01 and 1000")
    return sorted(values, reverse=True)


def multiplier(job: JobSpec, target: float) -> float:
    """The least noise multiplier with which all rounds of a job spend `target` or less at DELTA, to a part in 1000."""
    low, high = 1e-2, LARGEST_MULTIPLIER
    while high / low > 1.001:
        middle = float(np.sqrt(low * high))
        release = job.release
        assert release is not None  # noqa: S101  for mypy
        tried = Release(middle, release.sampling_rate, release.steps)
        low, high = (low, middle) if epsilon([tried] * job.rounds, DELTA) <= target else (middle, high)
    return high


def institutions_of(parts: Parts, count: int, seed: int) -> Parts:
    """The domains themselves, or `count` pieces of them. Errors as `scale.clients_of`."""
    if count == len(parts):
        return parts
    return clients_of(list(parts.values()), count, Division("by-domain"), seed)[0]


def job_of(
    subject: Subject, mechanism: Mechanism, seed: int, institutions: Sequence[str], target: float | None
) -> JobSpec:
    """The job that spends `target`; None for the same without privacy. Raises VeilfedError(JOB_INVALID)."""

    def job(noise_multiplier: float | None) -> JobSpec:
        keys = dict(mechanism.strategy)
        if noise_multiplier is not None and keys["name"] == "afl":
            keys["ridge"] = mechanism.ridge(len(institutions), subject.dimension, noise_multiplier)
        document = {
            "name": f"{subject.name}-privacy-{seed}",
            "strategy": {**keys, "classes": list(subject.classes), "dimension": subject.dimension},
            "cohort": {"train": list(institutions)},
            "rounds": mechanism.rounds,
            "quorum": len(institutions),
            "seed": seed,
            "fold": {"max_abs": 1e6, "max_norm": 1e9},
        }
        if noise_multiplier is not None:
            document["privacy"] = {**mechanism.privacy, "noise_multiplier": noise_multiplier, "delta": DELTA}
        return validate(JobSpec, json.dumps(document), mechanism.label, Code.JOB_INVALID)

    return job(None) if target is None else job(multiplier(job(1.0), target))


def study(
    subject: Subject,
    mechanisms: Sequence[str],
    seeds: Sequence[int],
    counts: Sequence[int],
    epsilons: Sequence[float],
    store: Store,
    ended: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Everything that was measured, as JSON; jobs that were finished before are read from their files.

    Raises VeilfedError: what `scale.clients_of` and `simulation.rounds` say.
    """
    data = subject.digest()
    noises = [None, *epsilons]
    rows = []
    for count in counts:
        divided = {
            seed: institutions_of(split_parts(subject.domains, subject.classes, seed), count, seed) for seed in seeds
        }
        for name in mechanisms:
            mechanism = MECHANISMS[name]
            cells = []
            for target in noises:
                results = []
                for seed, parts in divided.items():
                    job = job_of(subject, mechanism, seed, list(parts), target)
                    key = key_of(FORM, data, count, mechanism.shared, job.model_dump(mode="json"))
                    place = f"{name}-{count}-{'none' if target is None else f'{target:g}'}-{seed}"
                    kept = store.get(place, key)
                    if kept is None:
                        kept = _measured(job, parts, count if mechanism.shared else 1)
                        store.put(place, key, kept)
                    results.append(kept)
                    ended(mechanism.label)
                cells.append(_cell(target, results))
            rows.append({"mechanism": name, "label": mechanism.label, "institutions": count, "cells": cells})
    sizes = [len(part.train) for part in split_parts(subject.domains, subject.classes, seeds[0]).values()]
    return {
        "study": "privacy",
        "task": subject.name,
        "title": subject.title,
        "model": subject.model,
        "dimension": subject.dimension,
        "seeds": list(seeds),
        "delta": DELTA,
        "epsilons": list(epsilons),
        "training_rows": sum(sizes),
        "settings": {
            name: {
                "rounds": MECHANISMS[name].rounds,
                "strategy": dict(MECHANISMS[name].strategy),
                "privacy": dict(MECHANISMS[name].privacy),
            }
            for name in mechanisms
        },
        "rows": rows,
    }


def _cell(target: float | None, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "epsilon": target,
        "noise_multiplier": results[0]["noise_multiplier"],
        **{name: spread([result[name] for result in results]) for name in ("accuracy", "own")},
    }


def _measured(job: JobSpec, parts: Parts, noise_parties: int) -> dict[str, Any]:
    method = method_for(job.strategy)
    *_, last = simulation.rounds(job, parts, noise_parties=noise_parties)
    return {
        "accuracy": float(np.mean(list(measures.accuracies(method, last.model, {}, parts).values()))),
        "own": float(np.mean(list(measures.accuracies(method, last.model, last.states, parts).values()))),
        "noise_multiplier": None if job.privacy is None else job.privacy.noise_multiplier,
    }
