"""BlindFed's adapters: against the paper's formulas in plain loops, and what they learn that a linear probe cannot."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aggregator.strategies import strategy_for
from client_agent.data.source import Samples
from client_agent.egress import EgressPolicy
from client_agent.privacy.gaussian import seeded
from client_agent.privacy.mechanisms import Noise
from client_agent.state import JobFolder
from client_agent.trainers import Trains, method_for, trainer_for
from client_agent.trainers.blindfed import Blindfed
from client_agent.work import Order, perform, prepare
from tests.support.methods import CLASSES, job, strategy
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import BlindfedStrategy, UpdatePrivacy, parse_job
from veilfed.secagg.encoding import encoding_for
from veilfed.wire.tensors import Arrays, digest, map_bytes

D, L, T, K = 6, 4, 5, 3
RELEASED = [2, 4]
INSTITUTIONS = ("one", "two", "four")
Double = NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def spec(**changes: Any) -> BlindfedStrategy:
    values: dict[str, Any] = {"dimension": D, "blocks": L, "released": RELEASED, "tokens": T, "rank": 3, "alpha": 0.7}
    made = strategy("blindfed", **{**values, **changes})
    assert isinstance(made, BlindfedStrategy)
    return made


def method(**changes: Any) -> Blindfed:
    made = method_for(spec(**changes))
    assert isinstance(made, Blindfed)
    return made


def model_of(made: BlindfedStrategy, seed: int = 0) -> Arrays:
    """Without any zeros, so that every gradient is there."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in made.model_shapes.items()}


def outputs(samples: int, seed: int = 0, released: int = len(RELEASED), dimension: int = D) -> NDArray[np.float32]:
    """Block outputs of samples with 1 to T tokens."""
    rng = np.random.default_rng(seed)
    mask = np.arange(T) < rng.integers(1, T + 1, samples)[:, None]
    values = rng.standard_normal((samples, T, released * dimension)) * mask[..., None]
    return np.concatenate([mask[..., None], values], axis=2).astype(np.float32)


def refused(code: Code, function: Any, words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as caught:
        function()
    assert caught.value.code is code


# The formulas.


def reference(made: BlindfedStrategy, model: Arrays, features: NDArray[np.float32]) -> Double:
    """The probabilities [n, K], one token of one sample at a time."""
    down, up, w, b = (
        model[name].astype(np.float64) for name in ("adapter_down", "adapter_up", "classifier", "classifier_bias")
    )
    found = []
    for sample in features.astype(np.float64):
        ends = []
        for token in sample:
            if token[0] == 0:
                continue
            h = np.zeros(made.dimension)
            for block in range(1, made.blocks + 1):
                b_l = np.zeros(made.dimension)
                if block in made.released:
                    place = 1 + made.released.index(block) * made.dimension
                    b_l = token[place : place + made.dimension]
                inner = down[block - 1] @ (b_l + h)
                gelu = np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in inner])
                h = made.alpha * (up[block - 1] @ gelu) + h
            ends.append(h)
        scores = made.temperature * (w @ np.mean(ends, axis=0) + b)
        shares = np.exp(scores - scores.max())
        found.append(shares / shares.sum())
    return np.array(found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"released": [1]},
        {"released": [1, 3], "temperature": 3.0},
        {"released": [4], "alpha": 2.0, "rank": 1},
        {"blocks": 1, "released": [1]},
    ],
)
def test_the_forward_pass_is_that_of_a_plain_loop(changes: dict[str, Any]) -> None:
    made = spec(**changes)
    model, features = model_of(made), outputs(9, released=len(made.released))
    found = method(**changes).probabilities(model, None, features)
    np.testing.assert_allclose(found, reference(made, model, features), rtol=2e-5, atol=1e-6)


def test_padding_counts_for_nothing_and_chunks_are_like_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made = method()
    model, features = model_of(made.strategy), outputs(23)
    whole = made.probabilities(model, None, features)
    other = features.copy()
    other[..., 1:][other[..., 0] == 0] = 7.0
    np.testing.assert_array_equal(made.probabilities(model, None, other), whole)
    monkeypatch.setattr("client_agent.trainers.blindfed.CHUNK", 2 * T)
    np.testing.assert_allclose(made.probabilities(model, None, features), whole, rtol=1e-6)


def loss(made: BlindfedStrategy, model: Arrays, features: Any, labels: NDArray[np.int64]) -> float:
    return float(-np.log(reference(made, model, features)[np.arange(len(labels)), labels]).mean())


def test_a_step_goes_down_the_gradient_of_finite_differences() -> None:
    made = spec(rate=1.0, batch_size=64, milestones=[])
    model, features = model_of(made), outputs(7)
    labels = np.arange(7) % K
    trainer = trainer_for(method_for(made), features, labels, seed=1, institution="one", rounds=1)
    update, _ = trainer.train(model, None, 0)
    step = 1e-5
    for name, values in model.items():
        wanted = np.zeros(values.shape)
        for place in np.ndindex(values.shape):
            sides = []
            for sign in (1, -1):
                moved = values.astype(np.float64)
                moved[place] += sign * step
                sides.append(loss(made, {**model, name: moved}, features, labels))
            wanted[place] = (sides[0] - sides[1]) / (2 * step)
        found = values.astype(np.float64) - update[name].astype(np.float64)
        np.testing.assert_allclose(found, wanted, atol=2e-6, err_msg=name)
        assert np.abs(wanted).max() > 1e-4


def test_an_adapter_before_the_first_released_block_stays_as_it_is() -> None:
    made = spec(rate=1.0)
    model = model_of(made)
    trainer = trainer_for(method_for(made), outputs(7), np.arange(7) % K, seed=1, institution="one", rounds=1)
    update, _ = trainer.train(model, None, 0)
    moved = [np.abs(np.subtract(update["adapter_up"][n], model["adapter_up"][n])).max() > 0 for n in range(L)]
    assert moved == [False, True, True, True]


# The rate.


def test_the_rate_is_the_papers_and_follows_from_the_jobs_rounds() -> None:
    made = spec()
    rates = [made.rate_of(number, 50) for number in range(50)]
    assert rates == pytest.approx([1e-3] * 25 + [1e-4] * 15 + [1e-5] * 10)
    assert [made.rate_of(number, 5) for number in range(5)] == pytest.approx([1e-3] * 3 + [1e-4, 1e-5])
    assert made.rate_of(0, 1) == 1e-3
    assert spec(milestones=[]).rate_of(49, 50) == 1e-3


def test_training_takes_the_rate_of_its_round() -> None:
    made = spec(batch_size=64)
    model, features, labels = model_of(made), outputs(7), np.arange(7) % K
    trainer = trainer_for(method_for(made), features, labels, seed=1, institution="one", rounds=50)
    moves = [
        np.abs(np.subtract(trainer.train(model, None, number)[0]["classifier"], model["classifier"])).max()
        for number in (0, 24, 25, 40)
    ]
    np.testing.assert_allclose(moves, moves[0] * np.array([1, 1, 0.1, 0.01]), rtol=1e-2)


# Learning.


def puzzle(samples: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Tokens lie on both sides of zero along the direction of the class: their mean says nothing."""
    rng = np.random.default_rng(seed)
    features, labels = outputs(samples, seed, released=1), rng.integers(0, K, samples)
    features[..., 0] = 1
    signs = np.where(np.arange(T - 1) % 2, 1, -1)[:, None]
    features[..., 1:] = 0
    features[:, : T - 1, 1:] = 3 * np.eye(D)[labels][:, None] * signs
    features[..., 1:] += rng.normal(0, 0.3, (samples, T, D))
    return features, labels


def fold(made: BlindfedStrategy, updates: list[Arrays], current: Arrays) -> Arrays:
    """The next model, of masked updates, as the aggregator has them."""
    whole = job(made, INSTITUTIONS)
    encoding = encoding_for(whole, 0)
    total = encoding.form.zeros()
    for update in updates:
        encoding.form.add(total, encoding.encode(update, 1.0))
    model, _ = strategy_for(whole).fold_sum(total, len(updates), 0, partial(dict, current))
    return model


def test_together_they_learn_what_a_linear_probe_cannot() -> None:
    made = spec(blocks=1, released=[1], rank=16, alpha=1.0, rate=0.1, classes=CLASSES, batch_size=16)
    single = method_for(made)
    model = strategy_for(job(made, INSTITUTIONS)).initial()
    splits = [puzzle(60, seed) for seed in range(len(INSTITUTIONS))]
    trainers = [
        trainer_for(single, *split, seed=1, institution=name, rounds=30)
        for name, split in zip(INSTITUTIONS, splits, strict=True)
    ]
    tested = puzzle(300, 9)
    before = loss(made, model, *splits[0])
    for number in range(30):
        updates = [trainer.train(model, None, number)[0] for trainer in trainers]
        following = fold(made, updates, model)
        plain = strategy_for(job(made, INSTITUTIONS)).fold([(1.0, update) for update in updates], partial(dict, model))
        assert map_bytes(following) == map_bytes(plain)
        model = following
    right, of = single.evaluate(model, None, *tested)
    assert of == 300
    assert right / of > 0.9
    assert loss(made, model, *splits[0]) < before / 2
    assert probe(splits, tested) < 0.55


def probe(splits: list[tuple[NDArray[np.float32], NDArray[np.int64]]], tested: Any) -> float:
    """The accuracy of least squares on the mean of each sample's tokens."""

    def means(features: NDArray[np.float32]) -> Double:
        return np.concatenate([features[..., 1:].mean(axis=1), np.ones((len(features), 1))], axis=1)

    rows = np.concatenate([means(features) for features, _ in splits])
    labels = np.concatenate([labels for _, labels in splits])
    weights = np.linalg.lstsq(rows, np.eye(K)[labels], rcond=None)[0]
    return float(((means(tested[0]) @ weights).argmax(axis=1) == tested[1]).mean())


def trainer_of(made: BlindfedStrategy, institution: str = "one", **more: Any) -> Trains:
    return trainer_for(method_for(made), outputs(20), np.arange(20) % K, seed=1, institution=institution, **more)


def test_a_round_is_the_same_again_and_another_ones_is_not() -> None:
    made = spec(rate=0.1, batch_size=4, epochs=2)
    model = model_of(made)
    kept = map_bytes(model)

    def sent(institution: str, number: int) -> bytes:
        update, state = trainer_of(made, institution, rounds=9).train(model, None, number)
        assert state is None
        return map_bytes(update)

    assert sent("one", 1) == sent("one", 1)
    assert len({sent("one", 1), sent("one", 2), sent("two", 1)}) == 3
    assert map_bytes(model) == kept


def test_training_that_is_stopped_or_diverges() -> None:
    model = model_of(spec())
    refused(Code.CANCELLED, lambda: trainer_of(spec(), rounds=1).train(model, None, 0, lambda: True), "was stopped")
    wild = {name: np.multiply(values, 1e18, dtype=np.float32) for name, values in model.items()}
    refused(Code.UPDATE_INVALID, lambda: trainer_of(spec(rate=10.0), rounds=1).train(wild, None, 0), "diverged")
    refused(Code.INPUT_INVALID, lambda: trainer_of(spec(), rounds=1).train({}, None, 0), "are needed")


# With an agent's task, and with noise.


def test_a_task_is_trained_and_evaluated(tmp_path: Path) -> None:
    made = spec()
    whole = job(made, INSTITUTIONS, cohort={"train": list(INSTITUTIONS)})
    features = outputs(60)
    names = [str(number) for number in range(60)]
    samples = Samples("text", names, [CLASSES[number % K] for number in range(60)], names)
    policy = EgressPolicy(consent="allow", min_evaluation_samples=5)
    prepared = prepare(whole, "one", samples, features, 0.4, policy)
    data = map_bytes(model_of(made))
    folder = JobFolder(tmp_path / "job")
    done = perform(prepared, folder, Order(0, True, data, digest(data)), policy, lambda: False)
    assert [counts.name for counts in done.evaluations] == ["global"]
    assert (done.state, done.weight) == (b"", 1.0)
    again = perform(prepared, folder, Order(1, True, data, digest(data)), policy, lambda: False)
    assert again.update != done.update


def test_with_privacy_the_whole_update_is_clipped_and_noised() -> None:
    privacy = UpdatePrivacy(mode="update", noise_multiplier=1e-3, clip=0.01)
    made = spec(rate=1.0)
    job(made, INSTITUTIONS, privacy=privacy.model_dump())
    model = model_of(made)
    noise = Noise(privacy, source=seeded(3))
    update, state = trainer_of(made, rounds=1, noise=noise).train(model, None, 0)
    change = np.concatenate([np.subtract(update[name], model[name], dtype=np.float64).ravel() for name in model])
    assert 0.008 < np.linalg.norm(change) < 0.011
    assert state is None


# What is refused.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy__released": []}, "strategy.released"),
        ({"strategy__released": [0, 2]}, "from 1 to 4"),
        ({"strategy__released": [2, 5]}, "from 1 to 4"),
        ({"strategy__released": [4, 2]}, "ascending"),
        ({"strategy__released": [2, 2]}, "ascending"),
        ({"strategy__released": [2, 3]}, "neighbouring"),
        ({"strategy__milestones": [1.0]}, "strategy.milestones"),
        ({"strategy__rank": 0}, "strategy.rank"),
        ({"strategy__initial": "random"}, "strategy.initial"),
        ({"secure_aggregation": None}, "needs secure_aggregation"),
        ({"quorum": 2}, "quorum must be at least 3"),
        ({"privacy": {"mode": "sample", "noise_multiplier": 1, "clip": 1, "sampling_rate": 0.5}}, "not for blindfed"),
    ],
)
def test_a_job_that_cannot_be(change: dict[str, Any], words: str) -> None:
    document = job(spec(), INSTITUTIONS, cohort={"train": list(INSTITUTIONS)}).model_dump(mode="json")
    assert parse_job(json.dumps(document)).strategy == spec()
    for path, value in change.items():
        *parents, key = path.split("__")
        target = document
        for parent in parents:
            target = target[parent]
        target[key] = value
    refused(Code.JOB_INVALID, lambda: parse_job(json.dumps(document)), words)


def changed(place: Any, value: float) -> NDArray[np.float32]:
    features = outputs(6)
    features[place] = value
    return features


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (outputs(6, released=1), r"the job needs float32 \[n, 5, 13\]"),
        (outputs(6)[:, :4], r"\[6, 4, 13\]"),
        (outputs(6).astype(np.float64), "float64"),
        (outputs(6)[:0], "n > 0"),
        (changed((4, 0, 0), 0.5), "sample 4"),
        (changed((3, slice(None), 0), 0), "sample 3"),
        (changed((2, 0, 5), np.nan), "sample 2"),
        (changed((1, 0, 0), np.inf), "sample 1"),
    ],
)
def test_block_outputs_that_do_not_fit_the_job(features: Any, words: str) -> None:
    made, labels = method(), np.arange(len(features)) % K
    model = model_of(made.strategy)
    trainer = partial(trainer_for, made, features, labels, seed=1, institution="one", rounds=1)
    refused(Code.DATA_INVALID, trainer, words)
    refused(Code.DATA_INVALID, partial(made.evaluate, model, None, features, labels), words)


def test_the_first_model_is_random_where_it_has_to_be() -> None:
    made = job(spec(rank=64, dimension=400), INSTITUTIONS)
    first = strategy_for(made).initial()
    assert not first["classifier"].any()
    assert not first["classifier_bias"].any()
    assert float(first["adapter_down"].std()) == pytest.approx(400**-0.5, rel=0.02)
    assert float(first["adapter_up"].std()) == pytest.approx(64**-0.5, rel=0.02)
    assert map_bytes(strategy_for(made).initial()) == map_bytes(first)
    vectors = np.ones((K, 400), np.float32)
    refused(Code.JOB_INVALID, partial(strategy_for(made).initial, vectors), "takes no class vectors")
