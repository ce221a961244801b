"""An institution's part in a job of FedOPAL, in one process: the tuner and the sums of the agents, with a backbone.

The counterpart of client_agent.prompting, which asks an oracle over the network.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.trainers import State
from client_agent.trainers.fedopal import Fedopal, Tuned
from client_agent.trainers.prompts import Tuner
from client_agent.trainers.statistics import released
from veilfed.jobs import FIRST_PROMPTS
from veilfed.wire.tensors import Arrays
from veilfed_study.backbone import Backbone
from veilfed_study.parts import Part

__all__ = ["Prompted", "inputs_of"]


class Prompted:
    """Of the training rows of one part. Classes with fewer than `least` samples are left out."""

    def __init__(
        self, method: Fedopal, part: Part, seed: int, institution: str, least: int, backbone: Backbone
    ) -> None:
        self._method = method
        labels = part.domain.labels[part.train]
        rows = released(labels, len(method.strategy.classes), least)
        self._labels = labels[rows]
        self._inputs = inputs_of(part, part.train[rows])
        self._spec = method.tuning(seed, institution)
        self._backbone = backbone

    def initial_state(self, model: Arrays) -> None:
        """There is none before prompts are tuned."""

    def train(
        self,
        model: Arrays,
        state: State | None,
        round_number: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[Arrays, State | None]:
        """Tunes, embeds again, and sums; as many of these as the round is for."""
        strategy = self._method.strategy
        prompts = self._tuned(model) if strategy.tunes(round_number) else None
        features = None
        if not (strategy.reextract and prompts is not None):
            features = self._backbone.embed(
                self._inputs, self._method.prompts(model, None) if prompts is None else prompts
            )
        return Tuned(self._method, features, self._labels, prompts).train(model, state, round_number, cancelled)

    def _tuned(self, model: Arrays) -> NDArray[np.float32]:
        first = model[FIRST_PROMPTS].astype(np.float32)
        # A head of zeros, as the agents start from.
        head = np.zeros(self._method.strategy.classifier_shape, np.float32)
        tuner = Tuner(self._spec, first, self._labels, head)
        while not tuner.done:
            tuner.take([self._backbone.answer(self._inputs, question) for question in tuner.ask()])
        return tuner.prompts


def inputs_of(part: Part, rows: Sequence[int] | NDArray[np.intp]) -> list[Any]:
    """The raw inputs of some rows of a part's domain."""
    inputs = part.domain.samples.inputs
    return [inputs[row] for row in rows]
