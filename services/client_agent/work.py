"""What an institution computes for a task: counts on its test split, and what it has trained."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.data.source import Samples, class_indices, split
from client_agent.egress import EgressPolicy
from client_agent.privacy.mechanisms import Noise
from client_agent.state import Counts, Finished, JobFolder
from client_agent.trainers import Method, State, Trains, method_for, trainer_for
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec, Strategy, UpdatePrivacy
from veilfed.logs import get_logger
from veilfed.wire.tensors import Arrays, digest, map_bytes, parse_map

__all__ = ["Order", "Prepared", "known", "model_of", "perform", "prepare", "uncharged"]

log = get_logger("agent.work")

Float = NDArray[np.float32]
# Charges the budget of privacy: the charge's name, and the SHA-256 of what was made.
Charge = Callable[[str, str], None]


def uncharged(name: str, sha256: str) -> None:
    """For jobs without privacy, which are never charged."""
    raise VeilfedError(Code.INTERNAL, "a job with privacy, and nobody to charge")


@dataclass(frozen=True)
class Order:
    """A task without its token. `model` is a serialised TensorMap in canonical form."""

    round: int
    train: bool
    model: bytes
    model_sha256: str


@dataclass(frozen=True)
class Prepared:
    """An institution's part in a job. Without a trainer it evaluates only."""

    spec: JobSpec
    method: Method[Any]
    trainer: Trains | None
    train_samples: int
    test_features: Float
    test_labels: NDArray[np.int64]
    # Where the institution's own prompts give it others than a newcomer's.
    own_test_features: Float | None = None


def prepare(
    spec: JobSpec, institution: str, samples: Samples, features: Float, test_fraction: float, policy: EgressPolicy
) -> Prepared:
    """Splits the samples and checks them against the job.

    `features` is float32 [n, d] as the oracle gave them. Raises VeilfedError(DATA_INVALID).
    """
    strategy = spec.strategy
    labels = class_indices(samples.labels, strategy.classes)
    train, test = split(samples, strategy.classes, test_fraction, spec.seed)
    method, trainer = method_for(strategy), None
    if institution in spec.cohort.train:
        trainer = trainer_for(
            method,
            features[train],
            labels[train],
            seed=spec.seed,
            institution=institution,
            rounds=spec.rounds,
            min_class_samples=policy.min_class_samples,
            min_samples=policy.min_evaluation_samples,
            noise=None if spec.privacy is None else Noise(spec.privacy, spec.fold.fraction_bits, spec.noise_parties),
        )
    return Prepared(spec, method, trainer, len(train), features[test], labels[test])


def model_of(data: bytes, strategy: Strategy) -> Arrays:
    """The tensors of a serialised model. Raises VeilfedError(PROTOCOL_VIOLATION) if they are not the method's."""
    arrays, shapes = parse_map(data), strategy.model_shapes
    if arrays.keys() != shapes.keys():
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the model has other tensors than {sorted(shapes)}")
    for name, shape in shapes.items():
        if arrays[name].shape != shape or arrays[name].dtype != strategy.dtype(name):
            what = f"the model's {name} is not {strategy.dtype(name)} {list(shape)}"
            raise VeilfedError(Code.PROTOCOL_VIOLATION, what)
        if not np.isfinite(arrays[name]).all():
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "the model is not finite")
    return arrays


def known(folder: JobFolder, order: Order, policy: EgressPolicy) -> Finished | int:
    """The kept result of a task that was finished before; else how many other models the round was answered for.

    Raises VeilfedError(POLICY_DENIED) where that may not be done once more.
    """
    done = folder.finished(order.round)
    if done is not None and done.model_sha256 == order.model_sha256 and done.trained == order.train:
        return done
    answers = done.answers if done else 0
    if answers >= policy.max_answers_per_round:
        raise VeilfedError(Code.POLICY_DENIED, f"round {order.round} was answered {answers} times, for other models")
    return answers


def perform(
    prepared: Prepared,
    folder: JobFolder,
    order: Order,
    policy: EgressPolicy,
    cancelled: Callable[[], bool],
    charge: Charge = uncharged,
) -> Finished:
    """The result of a task, kept in `folder` before it is returned; the kept one if the task was finished before.

    A round starts from the state after the newest earlier round, so that no round is trained on top of itself. Of a
    job with privacy `charge` is told what is new before it is kept, and may refuse it.
    Raises VeilfedError, also for what the trainer says; CANCELLED when `cancelled` tells so.
    """
    done = known(folder, order, policy)
    if isinstance(done, Finished):
        return done
    start = folder.before(order.round)
    before = start.state if start else b""
    method, trainer = prepared.method, prepared.trainer
    model = model_of(order.model, prepared.spec.strategy)
    state = None
    if trainer is not None:
        where = f"job {folder.job_id}"
        state = method.read_state(before, where) if before else trainer.initial_state(model)
    evaluations: tuple[Counts, ...] = ()
    if method.evaluates_first or not order.train:
        evaluations = _evaluate(prepared, model, state, policy)
    update, after, weight = b"", before, 0.0
    if order.train:
        if trainer is None:
            raise VeilfedError(Code.TASK_INVALID, "the job's cohort does not list this institution for training")
        kept = folder.sent() if method.sends_once else None
        if kept is not None:
            update = kept
        else:
            started = time.monotonic()
            trained, new = trainer.train(model, state, order.round, cancelled)
            log.info("trained", job=folder.job_id, round=order.round, seconds=round(time.monotonic() - started, 4))
            update, after = map_bytes(trained), new.to_bytes() if new else b""
            if prepared.spec.privacy is not None:
                charge(folder.charge(order.round, done + 1), digest(update))
            if method.sends_once:
                folder.keep_sent(update)
        weight = method.update_weight(prepared.train_samples)
    elif not evaluations:
        raise VeilfedError(Code.POLICY_DENIED, "the test split is too small for its counts to be given out")
    finished = Finished(
        round=order.round,
        previous=start.round if start else -1,
        trained=order.train,
        model_sha256=order.model_sha256,
        weight=weight,
        evaluations=evaluations,
        model=order.model,
        update=update,
        state=after,
        answers=done + 1,
    )
    folder.save(finished)
    if prepared.spec.privacy is not None:
        folder.charged()
    return finished


def _evaluate(prepared: Prepared, model: Arrays, state: State | None, policy: EgressPolicy) -> tuple[Counts, ...]:
    """Counts as a newcomer and, where the institution trains, with its private state; none if not releasable."""
    features, labels = prepared.test_features, prepared.test_labels
    if not policy.releases_count(len(labels)):
        return ()
    counts = [Counts("global", *prepared.method.evaluate(model, None, features, labels))]
    # What is told of a private state is not noised where the state itself is not.
    if state is not None and not isinstance(prepared.spec.privacy, UpdatePrivacy):
        own = features if prepared.own_test_features is None else prepared.own_test_features
        counts.insert(0, Counts("personal", *prepared.method.evaluate(model, state, own, labels)))
    return tuple(counts)
