"""Tuning of prompts on toy objectives: the exact proximal step, what a stop and a resume come to, what is asked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from client_agent.trainers.evolution import Subspace
from client_agent.trainers.prompts import Answer, Question, Tuner, TuningSpec, proximal_step
from client_agent.trainers.state import State
from veilfed.errors import Code, VeilfedError

Float = NDArray[np.float32]

M, D, K, DIMENSION, N = 3, 5, 3, 4, 50
SPEC = TuningSpec(
    classes=K,
    dimension=DIMENSION,
    temperature=5.0,
    mu=0.1,
    epochs=2,
    batch_size=16,
    prompt_rate=0.5,
    head_rate=0.01,
    perturbation=None,
    seed=50,
    institution="north",
)
# What each way of tuning is, with the size of its tries.
WAYS: dict[str, dict[str, Any]] = {
    "gradients": {"perturbation": None},
    "forward-only": {"perturbation": 0.1},
    "cma-es": {"perturbation": 0.3, "subspace": Subspace(5, 8)},
}
QUERIES = {"gradients": 1, "forward-only": 2, "cma-es": 8}


class Oracle:
    """f(x; P) = x + B mean(P): a black box whose gradient is known. `asked` counts inputs."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, K, N)
        self.mixing = rng.standard_normal((DIMENSION, D))
        self.centres = rng.standard_normal((K, DIMENSION))
        shift = self.mixing @ rng.standard_normal(D)
        self.inputs = self.centres[self.labels] + 0.3 * rng.standard_normal((N, DIMENSION)) - 2 * shift
        self.asked = 0

    def embed(self, rows: NDArray[np.intp], prompts: NDArray[Any]) -> NDArray[np.float64]:
        self.asked += len(rows)
        found: NDArray[np.float64] = self.inputs[rows] + self.mixing @ prompts.astype(np.float64).mean(axis=0)
        return found

    def answer(self, question: Question) -> Answer:
        h = self.embed(question.rows, question.prompts)
        if question.head is None:
            return Answer(h.astype(np.float32))
        assert question.labels is not None
        gradient = np.zeros((M, D))
        for row, label in zip(h, question.labels, strict=True):
            z, length = row / np.linalg.norm(row), np.linalg.norm(row)
            scores = question.head @ z
            p = np.exp(scores - scores.max())
            p /= p.sum()
            p[label] -= 1
            dz = question.head.T @ p
            dh = (dz - z * (z @ dz)) / length
            gradient += np.tile(self.mixing.T @ dh / M, (M, 1))
        return Answer(h.astype(np.float32), gradient)


def start(oracle: Oracle, spec: TuningSpec = SPEC) -> Tuner:
    first = np.random.default_rng(7).standard_normal((M, D)).astype(np.float32)
    return Tuner(spec, first, oracle.labels, oracle.centres.astype(np.float32))


def go(tuner: Tuner, oracle: Oracle, until: int | None = None) -> list[float]:
    losses = []
    while not tuner.done and tuner.step != until:
        tuner.take([oracle.answer(question) for question in tuner.ask()])
        losses.append(tuner.loss)
    return losses


def cross_entropy(oracle: Oracle, tuner: Tuner) -> float:
    """Over all samples, with the prompts and the head as they are now."""
    h = oracle.embed(np.arange(N), tuner.prompts)
    scores = 5 * (h / np.linalg.norm(h, axis=1, keepdims=True)) @ tuner.state().tensors["head"].astype(float).T
    scores -= scores.max(axis=1, keepdims=True)
    return float(-(scores[np.arange(N), oracle.labels] - np.log(np.exp(scores).sum(axis=1))).mean())


Pair = st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).map(np.array)


@settings(max_examples=100)
@given(Pair, Pair, Pair, st.floats(1e-6, 1e3), st.floats(0, 1e300) | st.just(np.inf))
def test_the_proximal_step_is_exact_and_stable_for_every_mu(
    prompts: Any, first: Any, gradient: Any, rate: float, mu: float
) -> None:
    moved = proximal_step(prompts, first, gradient, rate, mu)
    assert np.isfinite(moved).all()
    # The distance from P_0 shrinks by 1 + eta mu, of what a step without the term would have come to.
    free = np.abs(prompts - rate * gradient - first)
    assert (np.abs(moved - first) <= free / (1 + rate * mu) + 1e-9 * (1 + np.abs(first))).all()
    if mu > 1e290:
        assert np.array_equal(moved.astype(np.float32), first.astype(np.float32))
    if mu == np.inf:
        assert np.array_equal(moved, first)
    if rate * mu < 1e6:
        paper = (prompts - rate * gradient + rate * mu * first) / (1 + rate * mu)
        assert np.allclose(moved, paper, rtol=1e-9, atol=1e-9 * (1 + np.abs(first).max() + free.max()))


@settings(max_examples=15)
@given(st.floats(1e15, 1e300), st.floats(1e-4, 1e3), st.sampled_from(list(WAYS)))
def test_an_infinite_mu_keeps_the_first_prompts(mu: float, rate: float, way: str) -> None:
    """An evolution's step falls with the root of mu, so there it takes a larger one."""
    oracle = Oracle()
    mu = max(mu, 1e25) if way == "cma-es" else mu
    tuner = start(oracle, replace(SPEC, mu=mu, prompt_rate=rate, epochs=1, **WAYS[way]))
    first = tuner.prompts.copy()
    go(tuner, oracle)
    assert tuner.prompts.tobytes() == first.tobytes()


@settings(max_examples=15)
@given(st.floats(0, 1e6), st.integers(0, 100), st.sampled_from(["gradients", "cma-es"]))
def test_no_mu_makes_it_diverge(mu: float, seed: int, way: str) -> None:
    oracle = Oracle(seed)
    tuner = start(oracle, replace(SPEC, mu=mu, **WAYS[way]))
    go(tuner, oracle)
    assert np.isfinite(tuner.prompts).all()
    assert np.abs(tuner.prompts).max() < 100


@pytest.mark.parametrize(("way", "epochs"), [("gradients", 2), ("forward-only", 30), ("cma-es", 10)])
def test_tuning_improves_the_objective(way: str, epochs: int) -> None:
    """The head stays, so that the prompts alone do it; the same box without a gradient needs more steps."""
    oracle = Oracle()
    spec = replace(SPEC, mu=0.0, head_rate=1e-12, epochs=epochs, **WAYS[way])
    tuner = start(oracle, spec)
    before = cross_entropy(oracle, tuner)
    go(tuner, oracle)
    assert cross_entropy(oracle, tuner) < 0.6 * before


def test_a_small_step_follows_the_gradient() -> None:
    """Against the difference of two whole runs of the objective, not the oracle's own gradient."""
    oracle = Oracle()
    tuner = start(oracle, replace(SPEC, mu=0.0, batch_size=N, prompt_rate=1e-2, head_rate=1e-12))
    first, before = tuner.prompts.astype(np.float64), cross_entropy(oracle, tuner)
    go(tuner, oracle, until=1)
    moved = tuner.prompts.astype(np.float64) - first
    # To first order the loss falls by |moved|^2 / eta.
    assert before - cross_entropy(oracle, tuner) == pytest.approx(float((moved**2).sum()) / 1e-2, rel=0.05)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 7])
def test_a_tuning_that_was_stopped_ends_as_if_it_had_not_been(stop: int, way: str) -> None:
    """Whatever else draws random numbers in between."""
    spec = replace(SPEC, **WAYS[way])
    whole = start(Oracle(), spec)
    losses = go(whole, Oracle())
    first = start(Oracle(), spec)
    go(first, Oracle(), until=stop)
    again = start(Oracle(), spec)
    again.resume(first.state().to_bytes(), "tuning.bin")
    np.random.seed(stop)  # the one that CMA-ES would draw from by default
    assert again.step == stop
    assert go(again, Oracle()) == losses[stop:]
    assert again.state().to_bytes() == whole.state().to_bytes()


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: data.replace(b"v", b"w")])
def test_damaged_states_are_refused(change: Callable[[bytes], bytes]) -> None:
    tuner = start(Oracle())
    with pytest.raises(VeilfedError, match=r"tuning\.bin") as caught:
        tuner.resume(change(tuner.state().to_bytes()), "tuning.bin")
    assert caught.value.code is Code.STATE_CORRUPT
    other = State.zeros({"prompts": (M, D)}, {})
    with pytest.raises(VeilfedError, match=r"tuning\.bin"):
        tuner.resume(other.to_bytes(), "tuning.bin")


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 3), st.sampled_from(list(WAYS)))
def test_each_epoch_asks_for_each_sample_once_and_says_so_before(
    samples: int, batch_size: int, epochs: int, way: str
) -> None:
    """Once for each try."""
    oracle = Oracle()
    spec = replace(SPEC, batch_size=batch_size, epochs=epochs, **WAYS[way])
    tuner = Tuner(spec, np.zeros((M, D), np.float32), oracle.labels[:samples], oracle.centres.astype(np.float32))
    each = QUERIES[way]
    assert tuner.queries == tuner.queries_left == epochs * samples * each
    rows: list[int] = []
    while not tuner.done:
        questions = tuner.ask()
        assert len(questions) == each
        rows += questions[0].rows.tolist()
        tuner.take([oracle.answer(question) for question in questions])
        assert tuner.queries_left == tuner.queries - oracle.asked
    assert sorted(rows) == sorted(list(range(samples)) * epochs)
    assert tuner.step == tuner.steps


def test_without_samples_nothing_is_asked() -> None:
    tuner = Tuner(SPEC, np.ones((M, D), np.float32), np.zeros(0, np.int64), np.zeros((K, DIMENSION), np.float32))
    assert (tuner.done, tuner.queries, tuner.queries_left, tuner.steps) == (True, 0, 0, 0)


def test_a_gradient_that_is_not_finite_ends_it() -> None:
    oracle = Oracle()
    tuner = start(oracle)
    (answer,) = (oracle.answer(question) for question in tuner.ask())
    with pytest.raises(VeilfedError, match="diverged at batch 0") as caught:
        tuner.take([replace(answer, gradient=np.full((M, D), np.nan))])
    assert caught.value.code is Code.UPDATE_INVALID
    assert tuner.step == 0


def test_an_evolution_searches_a_subspace_and_no_more() -> None:
    """All that it tries differs from P_0 by combinations of `dimension` directions; asked again, it tries the same."""
    oracle = Oracle()
    tuner = start(oracle, replace(SPEC, mu=0.0, **WAYS["cma-es"]))
    first, tried = tuner.prompts.copy(), []
    while not tuner.done:
        questions = tuner.ask()
        assert all(np.array_equal(one.prompts, two.prompts) for one, two in zip(questions, tuner.ask(), strict=True))
        tried += [(question.prompts - first).ravel() for question in questions]
        tuner.take([oracle.answer(question) for question in questions])
    lengths = np.linalg.svd(np.array(tried, np.float64), compute_uv=False)
    assert len(tried) == 8 * tuner.steps
    assert lengths[4] > 0.1
    assert lengths[5] < 1e-5
    assert np.linalg.norm(tuner.prompts - first) > 0.1


def test_the_distance_from_the_first_prompts_costs_what_mu_says() -> None:
    """Of equal cross-entropies the search takes the candidates that are nearer."""
    oracle = Oracle()
    far = {}
    for mu in (0.0, 10.0):
        tuner = start(oracle, replace(SPEC, mu=mu, head_rate=1e-12, epochs=20, **WAYS["cma-es"]))
        first = tuner.prompts.copy()
        go(tuner, oracle)
        far[mu] = float(np.linalg.norm(tuner.prompts - first))
    assert 0 < far[10.0] < far[0.0] / 3
