"""What an institution computes for a task: counts on its test split, and the trained classifier."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_agent.data.source import Samples, class_indices, split
from client_agent.egress import EgressPolicy
from client_agent.state import Counts, Finished, JobFolder
from client_agent.trainers import FedotState, FedotTrainer, evaluate, update_weight
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import FedotStrategy, JobSpec
from veilfed.wire.tensors import map_bytes, parse_map

__all__ = ["CLASSIFIER", "Order", "Prepared", "classifier_of", "perform", "prepare"]

# The one tensor of a model and of an update.
CLASSIFIER = "classifier"

Float = NDArray[np.float32]


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
    trainer: FedotTrainer | None
    train_samples: int
    test_features: Float
    test_labels: NDArray[np.int64]


def prepare(spec: JobSpec, institution: str, samples: Samples, features: Float, test_fraction: float) -> Prepared:
    """Splits the samples and checks them against the job.

    `features` is float32 [n, d] as the oracle gave them. Raises VeilfedError(DATA_INVALID).
    """
    strategy = spec.strategy
    labels = class_indices(samples.labels, strategy.classes)
    train, test = split(samples, strategy.classes, test_fraction, spec.seed)
    trainer = None
    if institution in spec.cohort.train:
        trainer = FedotTrainer(strategy, features[train], labels[train], seed=spec.seed, institution=institution)
    return Prepared(spec, trainer, len(train), features[test], labels[test])


def classifier_of(model: bytes, strategy: FedotStrategy) -> Float:
    """The classifier float32 [K, d] of a serialised model. Raises VeilfedError(PROTOCOL_VIOLATION)."""
    arrays = parse_map(model)
    shape = (len(strategy.classes), strategy.dimension)
    array = arrays.get(CLASSIFIER)
    if array is None or len(arrays) != 1 or array.shape != shape or array.dtype != np.float32:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"the model is not one classifier, float32 {list(shape)}")
    classifier: Float = array.astype(np.float32)
    if not np.isfinite(classifier).all():
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "the model is not finite")
    return classifier


def perform(
    prepared: Prepared, folder: JobFolder, order: Order, policy: EgressPolicy, cancelled: Callable[[], bool]
) -> Finished:
    """The result of a task, kept in `folder` before it is returned; the kept one if the task was finished before.

    A round starts from the state after the newest earlier round, so that no round is trained on top of itself.
    Raises VeilfedError, also for what the trainer says; CANCELLED when `cancelled` tells so.
    """
    done = folder.finished(order.round)
    if done is not None and done.model_sha256 == order.model_sha256 and done.trained == order.train:
        return done
    answers = done.answers + 1 if done else 1
    if answers > policy.max_answers_per_round:
        raise VeilfedError(
            Code.POLICY_DENIED,
            f"round {order.round} was answered {done.answers if done else 0} times, for other models",
        )
    start = folder.before(order.round)
    before = start.state if start else b""
    strategy = prepared.spec.strategy
    classifier = classifier_of(order.model, strategy)
    state = _state(before, strategy, f"job {folder.job_id}")
    evaluations = _evaluate(prepared, classifier, state, policy)
    update, after, weight = b"", before, 0.0
    if order.train:
        if prepared.trainer is None:
            raise VeilfedError(Code.TASK_INVALID, "the job's cohort does not list this institution for training")
        trained, new = prepared.trainer.train(classifier, state, order.round, cancelled)
        update, after = map_bytes({CLASSIFIER: trained}), new.to_bytes()
        weight = update_weight(strategy, prepared.train_samples)
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
        answers=answers,
    )
    folder.save(finished)
    return finished


def _state(data: bytes, strategy: FedotStrategy, where: str) -> FedotState:
    return FedotState.from_bytes(data, strategy, where) if data else FedotState.initial(strategy)


def _evaluate(prepared: Prepared, classifier: Float, state: FedotState, policy: EgressPolicy) -> tuple[Counts, ...]:
    """Counts with the identity and, where the institution trains, with its own transform; none if not releasable."""
    features, labels = prepared.test_features, prepared.test_labels
    if not policy.releases_count(len(labels)):
        return ()
    counts = [Counts("global", *evaluate(classifier, None, features, labels))]
    if prepared.trainer is not None:
        counts.insert(0, Counts("personal", *evaluate(classifier, state.transform, features, labels)))
    return tuple(counts)
