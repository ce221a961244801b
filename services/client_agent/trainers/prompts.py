"""FedOPAL (arXiv 2607.08368) at one institution: prompt tokens that are tuned on its training split.

    minimise   mean_i -log softmax(tau W_k z_i)[y_i] + mu/2 ||P_k - P_0||^2,   z = f(x; P_k) / ||f(x; P_k)||

over the prompts P_k [M, D], from P_0, and a temporary classifier W_k [K, d] that is thrown away. For each batch, with
the gradient g of the mean cross-entropy at P_k, the proximal step in its exact form

    P <- (P - eta g + eta mu P_0) / (1 + eta mu) = P_0 + (P - eta g - P_0) / (1 + eta mu)

which is stable for every mu >= 0, infinity included, and a step of Adam on W_k.

Nothing here talks to an oracle: `Tuner.ask` says which inputs are to be embedded with which prompts, and `Tuner.take`
gets the answer. g is the oracle's (`gradients`), or estimated forward-only by simultaneous perturbation (Spall, 1992,
equation 2.2): for a matrix S of random signs,

    g = (L(P + c S) - L(P - c S)) / 2c  S

with the cross-entropy L of the batch. The third way has no gradient at all: an evolution strategy in a random subspace
(client_agent.trainers.evolution), a generation for each batch, instead of the step.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_agent.trainers import adam
from client_agent.trainers.evolution import Evolution, Subspace
from client_agent.trainers.inputs import Float, Labels, check_labels, normalised
from client_agent.trainers.state import State
from veilfed.errors import Code, VeilfedError

__all__ = ["Answer", "Question", "Tuner", "TuningSpec", "proximal_step"]

Double = NDArray[np.float64]

HEAD = "head"
PROMPTS = "prompts"
LOSSES = "losses"


@dataclass(frozen=True)
class TuningSpec:
    """The parameters of one tuning."""

    classes: int
    dimension: int
    temperature: float
    mu: float
    epochs: int
    batch_size: int
    prompt_rate: float
    head_rate: float
    # None: with the oracle's gradients; else forward-only with this c.
    perturbation: float | None
    seed: int
    institution: str
    # Forward-only in this subspace; without it by simultaneous perturbation.
    subspace: Subspace | None = None


@dataclass(frozen=True, eq=False)
class Question:
    """The inputs `rows` are wanted with these prompts [M, D]; if there is a head [K, d], with the gradient of
    sum_i -log softmax(head z_i)[labels_i] with respect to the prompts."""

    rows: NDArray[np.intp]
    prompts: Float
    head: Float | None = None
    labels: Labels | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """Embeddings [n, d] as the oracle gave them, and the gradient [M, D] where there was a head."""

    embeddings: Float
    gradient: Double | None = None


def proximal_step(prompts: Double, first: Double, gradient: Double, rate: float, mu: float) -> Double:
    """P_0 + (P - eta g - P_0) / (1 + eta mu), all [M, D]."""
    step: Double = first + (prompts - rate * gradient - first) / (1 + rate * mu)
    return step


class Tuner:
    """One tuning, batch by batch.

    `first` is P_0 float32 [M, D], `labels` int64 [n] those of the training split, `head` W_k [K, d] at the start. What
    it comes to depends on these and on the answers alone. Raises VeilfedError(DATA_INVALID) for labels that do not fit.
    """

    def __init__(self, spec: TuningSpec, first: Float, labels: Labels, head: Float) -> None:
        check_labels(labels, len(labels), spec.classes)
        self._spec = spec
        self._first = first.astype(np.float64)
        self._labels = labels
        shape = spec.classes, spec.dimension
        self.prompts: Float = first.copy()
        self._head = adam.Parameter(_tensor(head, shape), spec.head_rate, torch.zeros(shape), torch.zeros(shape))
        self.step = 0
        self.loss = float("nan")
        self._evolution = self._search()

    def _search(self) -> Evolution | None:
        spec = self._spec
        if spec.subspace is None or spec.perturbation is None:
            return None
        random = self._random("evolution")
        return Evolution(self._first, spec.subspace, spec.perturbation, spec.mu, random, self.steps)

    @property
    def steps(self) -> int:
        """Batches in all."""
        return self._spec.epochs * self._batches

    @property
    def _batches(self) -> int:
        """Of one epoch."""
        return -(-len(self._labels) // self._spec.batch_size)

    @property
    def queries(self) -> int:
        """Inputs that the oracle is asked for in all."""
        return self._spec.epochs * len(self._labels) * self._queries_each

    @property
    def queries_left(self) -> int:
        """The same, of the batches that are to come."""
        epochs, batches = divmod(self.step, max(1, self._batches))
        asked = epochs * len(self._labels) + batches * self._spec.batch_size  # an epoch's last batch ends it
        return self.queries - asked * self._queries_each

    @property
    def _queries_each(self) -> int:
        if self._spec.subspace is not None:
            return self._spec.subspace.population
        return 1 if self._spec.perturbation is None else 2

    @property
    def done(self) -> bool:
        return self.step >= self.steps

    def ask(self) -> list[Question]:
        """What the next batch needs."""
        rows = self._rows(self.step)
        if self._spec.perturbation is None:
            head = (self._spec.temperature * self._head.value).numpy()
            return [Question(rows, self.prompts, head, self._labels[rows])]
        if self._evolution is not None:
            return [Question(rows, candidate) for candidate in self._evolution.candidates()]
        moved = np.float32(self._spec.perturbation) * self._signs()
        return [Question(rows, self.prompts + moved), Question(rows, self.prompts - moved)]

    def take(self, answers: list[Answer]) -> None:
        """One step. Raises VeilfedError(UPDATE_INVALID) for a gradient that is not finite."""
        rows = self._rows(self.step)
        labels = torch.from_numpy(self._labels[rows])
        losses, slopes = zip(*(self._cross_entropy(answer.embeddings, labels) for answer in answers), strict=True)
        if self._evolution is None:
            self.prompts = self._stepped(losses, answers[0])
        else:
            self._evolution.take(losses)
            self.prompts = self._evolution.prompts
        self.step += 1
        adam.step([self._head], [torch.stack(slopes).mean(dim=0)], self.step)
        self.loss = float(np.mean(losses))

    def _stepped(self, losses: Sequence[float], first: Answer) -> Float:
        """The prompts after a step along the gradient."""
        spec, gradient = self._spec, first.gradient
        if spec.perturbation is not None:
            gradient = (losses[0] - losses[1]) / (2 * spec.perturbation) * self._signs().astype(np.float64)
        elif gradient is not None:
            gradient = gradient / len(first.embeddings)
        if gradient is None or not np.isfinite(gradient).all():
            raise VeilfedError(
                Code.UPDATE_INVALID, f"tuning diverged at batch {self.step}", "Submit the job with lower rates."
            )
        moved = proximal_step(self.prompts.astype(np.float64), self._first, gradient, spec.prompt_rate, spec.mu)
        return moved.astype(np.float32)

    def _cross_entropy(self, embeddings: Float, labels: Tensor) -> tuple[float, Tensor]:
        """The mean over the batch, and its gradient with respect to W_k."""
        z = normalised(embeddings, self._spec.dimension)
        head = self._head.value.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(self._spec.temperature * (z @ head.T), labels)
        (slope,) = torch.autograd.grad(loss, head)
        return float(loss.detach()), slope

    def _rows(self, step: int) -> NDArray[np.intp]:
        """The rows of a batch: E permutations, the same whenever the batch is asked for again."""
        epoch, batch = divmod(step, self._batches)
        order = self._random(f"epoch {epoch}").permutation(len(self._labels))
        start = batch * self._spec.batch_size
        rows: NDArray[np.intp] = order[start : start + self._spec.batch_size]
        return rows

    def _signs(self) -> Float:
        random = self._random(f"signs {self.step}")
        return random.choice(np.array([-1, 1], np.float32), size=self._first.shape)

    def _random(self, purpose: str) -> np.random.Generator:
        name = f"{self._spec.seed}:{self._spec.institution}:prompts:{purpose}"
        return np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))

    # To be stopped, and to go on from there.

    def state(self) -> State:
        """Where the tuning stands."""
        return State(
            tensors={
                PROMPTS: self.prompts,
                HEAD: self._head.value.numpy(),
                **({} if self._evolution is None else {LOSSES: self._evolution.losses}),
            },
            means={HEAD: self._head.mean.numpy()},
            squares={HEAD: self._head.square.numpy()},
            steps=self.step,
            last_round=-1,
        )

    def resume(self, data: bytes, where: str) -> None:
        """Goes on from the bytes of a `state`. Raises VeilfedError(STATE_CORRUPT), which names `where`."""
        found = State.from_bytes(data, self.state(), where)
        shape = self._spec.classes, self._spec.dimension
        self.prompts = found.tensors[PROMPTS].astype(np.float32)
        self._head = adam.Parameter(
            _tensor(found.tensors[HEAD], shape),
            self._spec.head_rate,
            _tensor(found.means[HEAD], shape),
            _tensor(found.squares[HEAD], shape),
        )
        self.step = found.steps
        self._evolution = self._search()
        if self._evolution is not None:
            self._evolution.replay(found.tensors[LOSSES][: self.step].astype(np.float32))


def _tensor(array: NDArray[np.generic], shape: tuple[int, int]) -> Tensor:
    """A copy as float32."""
    return torch.from_numpy(np.array(array, np.float32).reshape(shape))
