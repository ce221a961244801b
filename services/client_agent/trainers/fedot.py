"""FEDOT at one institution (CVPR 2026, design 1-4): train and evaluate the shared classifier with a private transform.

    p = softmax(tau w_g (w_l h) / ||w_l h||),   w_l = Cayley(X)

Embeddings h are L2-normalised here; w_l keeps lengths, so ||w_l h|| = 1 and the division is left out.

    trainer = FedotTrainer(strategy, features, labels, seed=spec.seed, institution="nyt")
    classifier, state = trainer.train(classifier, state, round_number)      one round; the old state stays as it was
    evaluate(classifier, transform, features, labels) -> (correct, total)   transform: state.transform, or None
    probabilities(classifier, transform, features, temperature) -> [n, K]
    update_weight(strategy, samples) -> float                               for Update.weight

Classifiers are float32 [K, d] in and out, features float32 [n, d] as the oracle gave them, labels int64 [n] in
[0, K). A round's result depends on its arguments alone, bit for bit, on one machine with one number of threads; the
process sets that number once (torch.set_num_threads).
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_agent.trainers import adam
from client_agent.trainers.cayley import rotate
from client_agent.trainers.state import FedotState, transform_shape
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import FedotStrategy

__all__ = ["FedotTrainer", "evaluate", "probabilities", "update_weight"]

Float = NDArray[np.float32]
Labels = NDArray[np.int64]

_CHUNK = 1024  # rows evaluated at once: bounds memory


class FedotTrainer:
    """The training split of one institution in one job.

    `features` [n, d] and `labels` [n] as in the module's text. Raises VeilfedError(DATA_INVALID) where they do not
    fit the strategy or an embedding is not finite or zero.
    """

    def __init__(
        self, strategy: FedotStrategy, features: Float, labels: Labels, *, seed: int, institution: str
    ) -> None:
        _check_labels(labels, len(features), len(strategy.classes))
        self._strategy = strategy
        self._features = _normalised(features, strategy.dimension)
        self._labels = torch.from_numpy(np.array(labels))
        self._seed = seed
        self._institution = institution

    def train(
        self,
        classifier: Float,
        state: FedotState,
        round_number: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[Float, FedotState]:
        """Trains `classifier` and X for E epochs; returns the new ones and leaves the arguments as they were.

        `cancelled` is asked before each batch. Raises VeilfedError: TASK_INVALID if the state has this round or a
        later one in it already, INPUT_INVALID for a classifier of another shape, CANCELLED, and UPDATE_INVALID if
        the result is not finite.
        """
        if round_number <= state.last_round:
            raise VeilfedError(
                Code.TASK_INVALID,
                f"round {round_number} cannot be trained on a state that has round {state.last_round} in it",
            )
        shared = _parameter(classifier, state.classifier_mean, state.classifier_square, self._strategy.classifier_rate)
        private = _parameter(
            state.transform, state.transform_mean, state.transform_square, self._strategy.transform_rate
        )
        _check_shape(shared.value, (len(self._strategy.classes), self._strategy.dimension), "classifier")
        _check_shape(private.value, transform_shape(self._strategy), "transform")
        parameters = [shared, private] if private.value.numel() else [shared]
        count = state.steps
        for batch in self._batches(round_number):
            if cancelled():
                raise VeilfedError(Code.CANCELLED, f"training of round {round_number} was stopped")
            count += 1
            gradients = torch.autograd.grad(self._loss(shared.value, private.value, batch), _values(parameters))
            adam.step(parameters, gradients, count)
        new = FedotState(
            transform=_array(private.value),
            transform_mean=_array(private.mean),
            transform_square=_array(private.square),
            classifier_mean=_array(shared.mean),
            classifier_square=_array(shared.square),
            steps=count,
            last_round=round_number,
        )
        trained = _array(shared.value)
        if not (np.isfinite(trained).all() and np.isfinite(new.transform).all()):
            raise VeilfedError(
                Code.UPDATE_INVALID, f"training of round {round_number} diverged", "Submit the job with lower rates."
            )
        return trained, new

    def _batches(self, round_number: int) -> list[Tensor]:
        """The rows of each batch of the round: E permutations, the same whenever the round is trained again."""
        name = f"{self._seed}:{self._institution}:{round_number}"
        rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
        orders = [torch.from_numpy(rng.permutation(len(self._labels))) for _ in range(self._strategy.epochs)]
        return [batch for order in orders for batch in torch.split(order, self._strategy.batch_size)]

    def _loss(self, classifier: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        """Mean cross entropy of a batch."""
        h = self._features[rows]
        if x.numel():
            h = rotate(x, h)
        return torch.nn.functional.cross_entropy(self._strategy.temperature * (h @ classifier.T), self._labels[rows])


def evaluate(classifier: Float, transform: Float | None, features: Float, labels: Labels) -> tuple[int, int]:
    """(right answers, samples). `transform` is X [r, m, m]; None or r = 0 is the identity.

    Raises VeilfedError(DATA_INVALID or INPUT_INVALID) for what does not fit together.
    """
    _check_labels(labels, len(features), len(classifier))
    guesses = _scores(classifier, transform, features).argmax(dim=1).numpy()
    return int((guesses == labels).sum()), len(labels)


def probabilities(classifier: Float, transform: Float | None, features: Float, temperature: float) -> Float:
    """The probability of each class for each row of `features`: [n, K]. Errors as in `evaluate`."""
    return _array(torch.softmax(temperature * _scores(classifier, transform, features), dim=1))


def update_weight(strategy: FedotStrategy, samples: int) -> float:
    """The weight of an update that was trained on so many samples."""
    return float(samples) if strategy.weighting == "samples" else 1.0


@torch.no_grad()
def _scores(classifier: Float, transform: Float | None, features: Float) -> Tensor:
    """w_g (w_l h) for normalised h: [n, K]."""
    weights = torch.from_numpy(np.array(classifier))
    _check_shape(weights, (len(weights), features.shape[-1]), "classifier")
    h = _normalised(features, weights.shape[1])
    if transform is None or not transform.size:
        return h @ weights.T
    x = torch.from_numpy(np.array(transform))
    side = x.shape[-1]
    _check_shape(x, (weights.shape[1] // side, side, side), "transform")
    return torch.cat([rotate(x, chunk) @ weights.T for chunk in torch.split(h, _CHUNK)])


def _normalised(features: Float, dimension: int) -> Tensor:
    """The rows scaled to length 1, checked: [n, d]."""
    if features.ndim != 2 or features.shape[1] != dimension or not len(features):
        raise VeilfedError(
            Code.DATA_INVALID, f"embeddings have shape {list(features.shape)}; the job needs [n, {dimension}], n > 0"
        )
    h = torch.from_numpy(np.array(features, np.float32))
    lengths = torch.linalg.vector_norm(h, dim=1, keepdim=True)
    bad = torch.nonzero(~(torch.isfinite(lengths) & (lengths > 0)).squeeze(1))
    if len(bad):
        raise VeilfedError(Code.DATA_INVALID, f"embedding {int(bad[0])} is zero or not finite")
    normalised: Tensor = h / lengths
    return normalised


def _check_labels(labels: Labels, samples: int, classes: int) -> None:
    if labels.shape != (samples,) or labels.dtype != np.int64:
        raise VeilfedError(
            Code.DATA_INVALID, f"labels are {labels.dtype} {list(labels.shape)}; {samples} int64 are needed"
        )
    if samples and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise VeilfedError(Code.DATA_INVALID, f"labels must be between 0 and {classes - 1}")


def _check_shape(value: Tensor, shape: tuple[int, ...], name: str) -> None:
    if value.shape != shape or value.dtype != torch.float32:
        raise VeilfedError(
            Code.INPUT_INVALID, f"the {name} is {value.dtype} {list(value.shape)}; float32 {list(shape)} is needed"
        )


def _parameter(value: Float, mean: Float, square: Float, rate: float) -> adam.Parameter:
    """Copies: training works in place and the caller's arrays stay."""
    return adam.Parameter(
        torch.from_numpy(np.array(value)).requires_grad_(),
        rate,
        torch.from_numpy(np.array(mean)),
        torch.from_numpy(np.array(square)),
    )


def _values(parameters: list[adam.Parameter]) -> list[Tensor]:
    return [parameter.value for parameter in parameters]


def _array(tensor: Tensor) -> Float:
    array: Float = tensor.detach().numpy()
    return array
