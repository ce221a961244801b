"""One job of the study of one shot against many rounds, and what is measured of it."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.trainers import Method, State, method_for
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import CLASSIFIER, JobSpec
from veilfed.wire.tensors import Arrays, map_bytes
from veilfed_study import measures, simulation
from veilfed_study.backbone import Asked, Backbone
from veilfed_study.parts import Part, Parts
from veilfed_study.prompted import inputs_of

__all__ = ["measured"]

Hits = NDArray[np.bool_]


def measured(job: JobSpec, clients: Parts, least: int | None, backbone: Backbone | None, own: bool) -> dict[str, Any]:
    """Runs a job. `own` is left out, None, where it is not asked for.

    `seconds` are the processor's for all parties together without what the model takes, which is in `model_seconds`;
    both are without the evaluation. There is no accuracy, None, where there was no solution: no client may tell its
    sums, or lambda is too small.
    """
    method = method_for(job.strategy)
    tested = _Tested(method, next(iter(clients.values())), backbone)
    steps = simulation.rounds(job, clients, min_class_samples=least or simulation.LEAST, backbone=backbone)
    by_round: list[float | None] = []
    sent, seconds, solved, asked = 0, 0.0, True, Asked()
    while True:
        clock = _Clock(backbone)
        try:
            snapshot = next(steps, None)
        except VeilfedError as error:
            if error.code is not Code.SINGULAR:
                raise
            solved = False
            break
        seconds += clock.seconds()
        asked = clock.asked(asked)
        if snapshot is None:
            break
        last = snapshot
        # A first model of zeros has no accuracy.
        telling = method.evaluates_first or snapshot.round == job.rounds
        by_round.append(float(tested.hits(snapshot.model, None).mean()) if telling else None)
        sent += measures.longest(snapshot.updates)
    return {
        "accuracy": by_round[-1] if solved else None,
        "own": _own(tested, last, clients) if solved and own else None,
        "hits": "".join("01"[hit] for hit in tested.hits(last.model, None).astype(int)) if solved else None,
        "by_round": by_round if solved else [None] * (job.rounds + 1),
        "rounds": job.rounds,
        # Of one client, in all rounds together; the last model is received too.
        "bytes_sent": sent,
        "bytes_received": (job.rounds + 1) * len(map_bytes(last.model)),
        "samples_used": _used(clients, least or 1),
        "seconds": round(seconds, 3),
        "model_seconds": round(asked.seconds, 3),
        "inputs": asked.inputs,
        "gradients": asked.gradients,
    }


class _Clock:
    """From now on: the processor's seconds without the model's, and what the model was asked."""

    def __init__(self, backbone: Backbone | None) -> None:
        self._backbone = backbone
        self._before = Asked() if backbone is None else backbone.asked
        self._started = self._now()

    def _now(self) -> float:
        return time.process_time() - (0.0 if self._backbone is None else self._backbone.spent)

    def seconds(self) -> float:
        return self._now() - self._started

    def asked(self, so_far: Asked) -> Asked:
        """That and what was asked so far."""
        if self._backbone is None:
            return so_far
        new = self._backbone.asked.since(self._before)
        return Asked(so_far.inputs + new.inputs, so_far.gradients + new.gradients, so_far.seconds + new.seconds)


class _Tested:
    """The test rows of a part, with embeddings as a method wants them."""

    def __init__(self, method: Method[Any], part: Part, backbone: Backbone | None) -> None:
        self._method, self._part, self._backbone = method, part, backbone
        self.labels = part.evaluation[1]

    def hits(self, model: Arrays, state: State | None, rows: NDArray[np.intp] | None = None) -> Hits:
        """Which of the test rows, or of these of them, are told right."""
        held = self._part.held if rows is None else self._part.held[rows]
        prompts = self._method.prompts(model, state)
        if prompts is None or self._backbone is None:
            features = self._part.domain.features[held]
        else:
            features = self._backbone.embed(inputs_of(self._part, held), prompts)
        found: Hits = (
            self._method.probabilities(model, state, features).argmax(axis=1) == self._part.domain.labels[held]
        )
        return found


def _own(tested: _Tested, last: simulation.Snapshot, clients: Parts) -> float:
    """See `analytic`; classes without test rows are left out of a client's mix; clients with no others, of the mean."""
    labels, classes = tested.labels, len(last.model[CLASSIFIER])
    counts = np.bincount(labels, minlength=classes)

    def by_class(client: str | None, wanted: NDArray[np.bool_]) -> NDArray[np.float64]:
        rows = np.flatnonzero(wanted[labels])
        right = tested.hits(last.model, None if client is None else last.states.get(client), rows)
        return np.bincount(labels[rows][right], minlength=classes) / np.maximum(counts, 1)

    shared = None
    found = []
    for name, part in clients.items():
        mix = np.bincount(part.training[1], minlength=classes) * (counts > 0)
        if not mix.any():
            continue
        if name in last.states:
            reached = by_class(name, mix > 0)
        else:
            shared = by_class(None, counts > 0) if shared is None else shared
            reached = shared
        found.append(float(mix @ reached / mix.sum()))
    return float(np.mean(found)) if found else float("nan")


def _used(clients: Parts, least: int) -> int:
    """Training rows that the policy lets be used, of all clients together."""
    counts = [np.bincount(part.training[1]) for part in clients.values()]
    return int(sum(count[count >= least].sum() for count in counts))
