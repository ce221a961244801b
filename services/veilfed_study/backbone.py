"""The foundation model in this process, as the oracle of an institution's own zone: embeddings and gradients."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.trainers.prompts import Answer, Question
from fm_oracle.models.base import PREPARED, Model

__all__ = ["Asked", "Backbone"]

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Asked:
    """How many inputs were embedded, how many of them with a gradient, and the processor's seconds for it."""

    inputs: int = 0
    gradients: int = 0
    seconds: float = 0.0

    def since(self, before: "Asked") -> "Asked":
        return Asked(
            self.inputs - before.inputs, self.gradients - before.gradients, round(self.seconds - before.seconds, 3)
        )


class Backbone:
    """What was asked before is remembered: jobs that differ in lambda alone tune the same prompts.

    `asked` counts that as if it were computed again; `spent` has the seconds that were really spent.
    """

    def __init__(self, model: Model[Any]) -> None:
        self._model = model
        self._known: dict[str, tuple[Answer, float]] = {}
        self.asked = Asked()
        self.spent = 0.0

    @property
    def prompt_width(self) -> int:
        """D; 0 for a model that takes no prompts."""
        return self._model.card.prompt_width

    def forget(self) -> None:
        """Frees what is remembered."""
        self._known.clear()

    def embed(self, inputs: Sequence[Any], prompts: Float | None) -> Float:
        """Embeddings float32 [n, d], with prompt tokens [M, D] if there are any."""
        parts = [np.empty((0, self._model.card.dimension), np.float32)]
        for start in range(0, len(inputs), PREPARED):
            piece = inputs[start : start + PREPARED]
            parts.append(self._remembered(piece, [prompts], partial(self._embedded, piece, prompts)).embeddings)
        return np.concatenate(parts)

    def answer(self, inputs: Sequence[Any], question: Question) -> Answer:
        """To a question of a tuning; `inputs` are all those that its rows are of."""
        wanted = [inputs[row] for row in question.rows]
        if question.head is None or question.labels is None:
            return Answer(self.embed(wanted, question.prompts))
        head, labels = question.head, question.labels

        def compute() -> Answer:
            gradient, embeddings = self._model.prompt_gradient(
                self._model.prepare(wanted), question.prompts, head, labels
            )
            return Answer(embeddings, gradient.astype(np.float64))

        return self._remembered(wanted, [question.prompts, head, labels], compute)

    def _embedded(self, inputs: Sequence[Any], prompts: Float | None) -> Answer:
        prepared = self._model.prepare(inputs)
        if prompts is None:
            return Answer(self._model.forward(prepared))
        return Answer(self._model.forward_prompted(prepared, prompts))

    def _remembered(
        self, inputs: Sequence[Any], arrays: Sequence[NDArray[Any] | None], compute: Callable[[], Answer]
    ) -> Answer:
        key = _digest(inputs, arrays)
        if key not in self._known:
            started = time.process_time()
            answer = compute()
            seconds = time.process_time() - started
            self.spent += seconds
            self._known[key] = answer, seconds
        answer, seconds = self._known[key]
        gradients = 0 if answer.gradient is None else len(inputs)
        self.asked = Asked(
            self.asked.inputs + len(inputs), self.asked.gradients + gradients, self.asked.seconds + seconds
        )
        return answer


def _digest(inputs: Sequence[Any], arrays: Sequence[NDArray[Any] | None]) -> str:
    total = hashlib.sha256()
    for value in inputs:
        data = value.encode() if isinstance(value, str) else bytes(value)
        total.update(hashlib.sha256(data).digest())
    for array in arrays:
        total.update(b"none" if array is None else f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return total.hexdigest()
