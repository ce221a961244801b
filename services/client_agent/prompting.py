"""An institution's part in one round of a job with prompts: what is tuned and embedded before anything is computed.

In a training round prompts are tuned with the oracle of the own zone, and the samples are embedded again with them; in
an evaluation the test split is embedded with the mean prompt and with the institution's own.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from client_agent.data.source import class_indices, split
from client_agent.egress import EgressPolicy
from client_agent.features import Features
from client_agent.state import JobFolder
from client_agent.trainers.fedopal import Fedopal, Tuned
from client_agent.trainers.prompts import Tuner
from client_agent.trainers.state import State
from client_agent.trainers.statistics import released
from client_agent.tuning import tune
from client_agent.work import Order, Prepared, model_of
from veilfed.jobs import FIRST_PROMPTS, FedopalStrategy, JobSpec
from veilfed.wire.tensors import Arrays

__all__ = ["Prompting"]

Float = NDArray[np.float32]
Labels = NDArray[np.int64]
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class _Rows:
    """Rows of the samples to learn from and to test on, and the classes of all samples."""

    train: Rows
    test: Rows
    labels: Labels


class Prompting:
    """One order of a job. `act` is told what is being done."""

    def __init__(
        self,
        spec: JobSpec,
        institution: str,
        features: Features,
        policy: EgressPolicy,
        folder: JobFolder,
        order: Order,
        test_fraction: float,
    ) -> None:
        assert isinstance(spec.strategy, FedopalStrategy)  # noqa: S101  for mypy: the worker sees to it
        self._spec = spec
        self._strategy = spec.strategy
        self._method = Fedopal(spec.strategy)
        self._institution = institution
        self._features = features
        self._policy = policy
        self._folder = folder
        self._order = order
        self._test_fraction = test_fraction

    async def prepared(
        self, arithmetic: Executor, act: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> Prepared:
        """What `work.perform` needs. Raises VeilfedError: what the data, the oracle, the gate or the tuning say."""
        model = model_of(self._order.model, self._strategy)
        rows = await self._rows()
        if not self._order.train:
            act("embedding")
            return await self._evaluating(model, rows)
        prompts = None
        if self._strategy.tunes(self._order.round):
            act("training")
            prompts = await self._tuned(model, rows, arithmetic, cancelled)
        features = None
        if not (self._strategy.reextract and prompts is not None):
            act("embedding")
            given = self._method.prompts(model, None) if prompts is None else prompts
            features = await self._embedded(given, rows.train)
        trainer = Tuned(self._method, features, rows.labels[rows.train], prompts)
        return Prepared(self._spec, self._method, trainer, len(rows.train), self._no_features, self._no_labels)

    async def _rows(self) -> _Rows:
        samples = await self._features.samples()

        def rows() -> _Rows:
            classes = self._strategy.classes
            labels = class_indices(samples.labels, classes)
            train, test = split(samples, classes, self._test_fraction, self._spec.seed)
            given = released(
                labels[train], len(classes), self._policy.min_class_samples, self._policy.min_evaluation_samples
            )
            return _Rows(train[given], test, labels)

        return await asyncio.to_thread(rows)

    async def _tuned(self, model: Arrays, rows: _Rows, arithmetic: Executor, cancelled: Callable[[], bool]) -> Float:
        """P_k, tuned from P_0 on the samples that may be told about."""
        strategy = self._strategy
        first = model[FIRST_PROMPTS].astype(np.float32)
        # A head of zeros: the first batch says nothing about the prompts, and needs no samples to be embedded before.
        head = np.zeros(strategy.classifier_shape, np.float32)
        spec = self._method.tuning(self._spec.seed, self._institution)
        made = partial(Tuner, spec, first, rows.labels[rows.train], head)
        tuner = await asyncio.get_running_loop().run_in_executor(arithmetic, made)
        async with self._features.oracle(strategy.dimension) as (samples, oracle):
            oracle.check_prompts(strategy.prompt_width, gradients=strategy.tuning == "gradients")
            sha256 = self._order.model_sha256
            # The samples are embedded again with what is found, in this round or the next.
            after = len(rows.train)
            await tune(tuner, oracle, samples, rows.train, self._folder, sha256, arithmetic, cancelled, after)
        return tuner.prompts

    async def _evaluating(self, model: Arrays, rows: _Rows) -> Prepared:
        method, trains = self._method, self._institution in self._spec.cohort.train
        trainer = Tuned(method, None, self._no_labels, None) if trains else None
        test = rows.test if self._policy.releases_count(len(rows.test)) else rows.test[:0]
        state = await asyncio.to_thread(self._state) if trains else None
        own = None if state is None else await self._embedded(method.prompts(model, state), test)
        features = await self._embedded(method.prompts(model, None), test)
        return Prepared(self._spec, method, trainer, 0, features, rows.labels[test], own)

    def _state(self) -> State | None:
        before = self._folder.before(self._order.round)
        return self._method.read_state(before.state, f"job {self._folder.job_id}") if before and before.state else None

    async def _embedded(self, prompts: Float | None, rows: Rows) -> Float:
        """Features [len(rows), d]; nothing is asked where there are no rows."""
        if prompts is None or not len(rows):
            return self._no_features
        return await self._features.prompted(self._strategy.dimension, prompts, rows)

    @property
    def _no_features(self) -> Float:
        return np.empty((0, self._strategy.dimension), np.float32)

    @property
    def _no_labels(self) -> Labels:
        return np.empty(0, np.int64)
