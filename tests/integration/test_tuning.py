"""Tuning of prompts at a real oracle, through the egress gate: the objective falls, for as many queries as was said."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.data.config import TableConfig
from client_agent.data.source import class_indices, load
from client_agent.features import embed
from client_agent.state import StateFolder
from client_agent.trainers.evolution import Subspace
from client_agent.trainers.prompts import Tuner, TuningSpec
from client_agent.tuning import tune
from tests.integration.test_oracle_prompts import agent
from tests.integration.test_oracle_stream import oracle
from tests.support.agents import CLASSES, DIMENSION, PromptedLetters, write_data
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from veilfed.errors import Code, VeilfedError

KINDS: dict[str, dict[str, Any]] = {
    "gradients": {"perturbation": None, "prompt_rate": 0.1, "epochs": 15},
    "forward-only": {"perturbation": 0.2, "prompt_rate": 0.1, "epochs": 40},
    "cma-es": {"perturbation": 0.2, "prompt_rate": 0.1, "epochs": 10, "subspace": Subspace(8, 8)},
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


def spec(**values: Any) -> TuningSpec:
    """The head stays as it is, so that what falls falls by the prompts."""
    fixed: dict[str, Any] = {
        "temperature": 5.0,
        "mu": 0.0,
        "batch_size": 20,
        "head_rate": 1e-12,
        "seed": 1,
        "institution": "north",
    }
    return TuningSpec(classes=2, dimension=DIMENSION, **fixed, **values)


@pytest.mark.parametrize("kind", KINDS)
@asynchronous
async def test_the_objective_falls(federation: Federation, tmp_path: Path, kind: str) -> None:
    samples = load(TableConfig(source="table", path=write_data(tmp_path / "data.csv", 0, 40)))
    labels, rows = class_indices(samples.labels, CLASSES), np.arange(40)
    first = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    head = np.random.default_rng(1).standard_normal((2, DIMENSION)).astype(np.float32)
    tuner = Tuner(spec(**KINDS[kind]), first, labels, head)
    folder = StateFolder(tmp_path / "state").job("job-1")
    allowed = "gradients" if kind == "gradients" else "forward"
    async with (
        oracle(federation, tmp_path / "oracle", PromptedLetters(), prompts=allowed, quota=5000) as running,
        agent(running, tmp_path) as client,
    ):

        async def loss() -> float:
            h = (await embed(client, "text", samples.inputs, tuner.prompts)).astype(np.float64)
            scores = 5 * (h / np.linalg.norm(h, axis=1, keepdims=True)) @ head.astype(np.float64).T
            shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            return float(-np.log(shares[rows, labels]).mean())

        before, expected = await loss(), tuner.queries
        with ThreadPoolExecutor(1) as arithmetic:
            await tune(tuner, client, samples, rows, folder, "a" * 64, arithmetic, lambda: False)
        assert await loss() < 0.9 * before
        card = await (await running.client()).describe()
        assert card.quota_left == 5000 - 2 * 40 - expected
        # Once more from where it stands: at the end, nothing is asked.
        again = Tuner(spec(**KINDS[kind]), first, labels, head)
        with ThreadPoolExecutor(1) as arithmetic:
            await tune(again, client, samples, rows, folder, "a" * 64, arithmetic, lambda: False)
        assert again.prompts.tobytes() == tuner.prompts.tobytes()
        assert (await (await running.client()).describe()).quota_left == card.quota_left


@asynchronous
async def test_a_tuning_that_is_stopped_or_too_large(federation: Federation, tmp_path: Path) -> None:
    samples = load(TableConfig(source="table", path=write_data(tmp_path / "data.csv", 0, 40)))
    labels, rows = class_indices(samples.labels, CLASSES), np.arange(40)
    folder = StateFolder(tmp_path / "state").job("job-1")
    first, head = np.zeros((3, 8), np.float32), np.zeros((2, DIMENSION), np.float32)
    async with (
        oracle(federation, tmp_path / "oracle", PromptedLetters(), prompts="gradients", quota=100) as running,
        agent(running, tmp_path) as client,
    ):
        with ThreadPoolExecutor(1) as arithmetic:
            exceeded = Code.QUOTA_EXCEEDED
            for epochs, after, stopped, code in ((2, 20, True, Code.CANCELLED), (2, 21, False, exceeded)):
                tuner = Tuner(spec(**{**KINDS["gradients"], "epochs": epochs}), first, labels, head)
                with pytest.raises(VeilfedError) as caught:
                    await tune(tuner, client, samples, rows, folder, "a" * 64, arithmetic, lambda: stopped, after)  # noqa: B023
                assert caught.value.code is code
        assert (await (await running.client()).describe()).quota_left == 100
