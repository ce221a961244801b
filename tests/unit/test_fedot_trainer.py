"""One institution's round: against the formulas in double precision, its repeatability and its refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from client_agent.trainers import FedotState, FedotTrainer, evaluate, probabilities, update_weight
from tests.support import dense
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import FedotStrategy

Float = NDArray[np.float32]


def strategy(**changes: Any) -> FedotStrategy:
    values: dict[str, Any] = {"name": "fedot", "classes": ["a", "b", "c"], "dimension": 12, "blocks": 3}
    return FedotStrategy.model_validate(values | {"batch_size": 16, "transform_rate": 1e-2} | changes)


def data(samples: int = 50, seed: int = 0) -> tuple[Float, NDArray[np.int64]]:
    """Three noisy directions: classes that a linear classifier can learn."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, samples)
    features = 2 * np.eye(12, dtype=np.float32)[labels] + rng.normal(0, 0.5, (samples, 12)).astype(np.float32)
    return features.astype(np.float32), labels


def first_classifier(seed: int = 1) -> Float:
    return (0.1 * np.random.default_rng(seed).normal(size=(3, 12))).astype(np.float32)


def trainer(spec: FedotStrategy | None = None, seed: int = 50, institution: str = "one") -> FedotTrainer:
    return FedotTrainer(spec or strategy(), *data(), seed=seed, institution=institution)


def train(rounds: int, spec: FedotStrategy | None = None, **options: Any) -> tuple[Float, FedotState]:
    spec = spec or strategy()
    classifier, state = first_classifier(), FedotState.initial(spec)
    for number in range(rounds):
        classifier, state = trainer(spec, **options).train(classifier, state, number)
    return classifier, state


def accuracy(classifier: Float, state: FedotState) -> float:
    correct, total = evaluate(classifier, state.transform, *data(seed=7))
    return correct / total


def test_one_step_is_adam_on_the_papers_loss() -> None:
    """A round of one batch against autograd through the formed transform in double precision and torch's own Adam."""
    spec = strategy(batch_size=64)
    features, labels = data()
    rng = np.random.default_rng(3)
    start = FedotState.initial(spec)
    x0 = rng.normal(0, 0.5, start.transform.shape).astype(np.float32)
    start = FedotState(x0, *(np.zeros_like(x0),) * 2, start.classifier_mean, start.classifier_square, 0, -1)
    classifier, state = trainer(spec).train(first_classifier(), start, 0)

    w = torch.from_numpy(first_classifier()).double().requires_grad_()
    x = torch.from_numpy(x0).double().requires_grad_()
    h = torch.from_numpy(features).double()
    picked = dense.classify(w, x, h, spec.temperature)[torch.arange(len(labels)), torch.from_numpy(labels)]
    (-picked.log()).mean().backward()  # type: ignore[no-untyped-call]
    torch.optim.Adam([{"params": [w], "lr": spec.classifier_rate}, {"params": [x], "lr": spec.transform_rate}]).step()
    np.testing.assert_allclose(classifier, w.detach().numpy(), atol=1e-5)
    # Symmetric parts of X have no gradient but rounding, which Adam blows up; only the skew part is defined.
    np.testing.assert_allclose(skew(state.transform), skew(x.detach().numpy()), atol=1e-4)


def skew(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray((x - x.transpose(0, 2, 1)) / 2)


def test_training_learns_and_keeps_the_transform_orthogonal() -> None:
    spec = strategy(epochs=5)
    before = accuracy(first_classifier(), FedotState.initial(spec))
    classifier, state = train(20, spec)
    assert accuracy(classifier, state) > max(0.9, before)
    w = dense.transform(torch.from_numpy(state.transform).double())
    assert not torch.allclose(w, torch.eye(12, dtype=w.dtype), atol=1e-2)
    torch.testing.assert_close(w @ w.T, torch.eye(12, dtype=w.dtype))
    assert torch.linalg.det(w).item() == pytest.approx(1.0)


def test_the_private_transform_undoes_a_rotation_that_the_classifier_cannot_know() -> None:
    """The classifier is right for others; this institution's embeddings are rotated; only X can adapt to that."""
    spec = strategy(blocks=1, classifier_rate=1e-9, epochs=20, classes=["a", "b", "c"])
    features, labels = data(200)
    turned = (features @ np.linalg.qr(np.random.default_rng(8).normal(size=(12, 12)))[0]).astype(np.float32)
    shared = np.eye(3, 12, dtype=np.float32)
    _, state = FedotTrainer(spec, turned, labels, seed=1, institution="one").train(shared, FedotState.initial(spec), 0)
    alone, total = evaluate(shared, None, turned, labels)
    adapted, _ = evaluate(shared, state.transform, turned, labels)
    assert alone < 0.7 * total
    assert adapted > 0.9 * total


def test_a_round_gives_the_same_bits_again() -> None:
    first, second = train(3), train(3)
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1].to_bytes() == second[1].to_bytes()


def test_a_round_goes_on_from_saved_state_bit_for_bit() -> None:
    spec = strategy()
    classifier, state = train(2)
    revived = FedotState.from_bytes(state.to_bytes(), spec)
    one = trainer().train(classifier, state, 2)
    two = trainer().train(classifier, revived, 2)
    assert one[0].tobytes() == two[0].tobytes()
    assert one[1].to_bytes() == two[1].to_bytes()


def test_the_order_of_batches_follows_from_seed_institution_and_round() -> None:
    base = train(1)[0]
    assert train(1, seed=51)[0].tobytes() != base.tobytes()
    assert train(1, institution="two")[0].tobytes() != base.tobytes()
    state = FedotState.initial(strategy())
    assert trainer().train(first_classifier(), state, 1)[0].tobytes() != base.tobytes()


def test_training_leaves_its_arguments_as_they_were() -> None:
    classifier, state = first_classifier(), FedotState.initial(strategy())
    classifier.flags.writeable = False  # as arrays from the wire are
    before = classifier.tobytes(), state.to_bytes()
    trained, new = trainer().train(classifier, state, 0)
    assert (classifier.tobytes(), state.to_bytes()) == before
    assert trained.tobytes() != before[0]
    assert new.last_round == 0
    assert new.steps == 4  # 50 samples in batches of 16


def test_the_identity_has_no_transform_and_equals_a_transform_that_does_not_move() -> None:
    plain, state = train(3, strategy(transform="identity"))
    assert state.transform.shape == (0, 4, 4)
    frozen, _ = train(3, strategy(transform_rate=1e-30))
    np.testing.assert_allclose(plain, frozen, atol=1e-6)
    assert evaluate(plain, state.transform, *data()) == evaluate(plain, None, *data())


def test_the_length_of_an_embedding_does_not_matter() -> None:
    features, labels = data()
    scaled = (features * np.linspace(0.5, 50, len(features), dtype=np.float32)[:, None]).astype(np.float32)
    state = FedotState.initial(strategy())
    one = FedotTrainer(strategy(), features, labels, seed=1, institution="a").train(first_classifier(), state, 0)
    two = FedotTrainer(strategy(), scaled, labels, seed=1, institution="a").train(first_classifier(), state, 0)
    np.testing.assert_allclose(one[0], two[0], atol=1e-4)


def test_probabilities_and_counts_are_those_of_the_formula() -> None:
    classifier, state = train(5)
    features, labels = data(3000, seed=9)  # more than is evaluated at once
    expected = dense.classify(
        torch.from_numpy(classifier).double(),
        torch.from_numpy(state.transform).double(),
        torch.from_numpy(features).double(),
        20.0,
    ).numpy()
    got = probabilities(classifier, state.transform, features, 20.0)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(got.sum(axis=1), 1.0, atol=1e-5)
    correct, total = evaluate(classifier, state.transform, features, labels)
    assert total == 3000
    assert correct == int((expected.argmax(axis=1) == labels).sum())


def test_a_round_is_not_trained_on_top_of_itself() -> None:
    classifier, state = train(2)
    for number in (0, 1):
        with pytest.raises(VeilfedError, match="has round 1 in it") as refused:
            trainer().train(classifier, state, number)
        assert refused.value.code is Code.TASK_INVALID
    trainer().train(classifier, state, 5)  # rounds may be missed


def test_training_stops_when_it_is_told_to() -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(VeilfedError) as refused:
        trainer().train(first_classifier(), FedotState.initial(strategy()), 0, cancelled)
    assert refused.value.code is Code.CANCELLED
    assert len(asked) == 3


def test_divergence_is_an_error() -> None:
    classifier = np.full((3, 12), 3e38, np.float32)
    with pytest.raises(VeilfedError) as refused:
        trainer().train(classifier, FedotState.initial(strategy()), 0)
    assert refused.value.code is Code.UPDATE_INVALID


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_useless_embedding_is_named_by_its_row(value: float) -> None:
    features, labels = data()
    features[17] = value
    with pytest.raises(VeilfedError, match="embedding 17 ") as refused:
        FedotTrainer(strategy(), features, labels, seed=1, institution="a")
    assert refused.value.code is Code.DATA_INVALID


def test_data_that_does_not_fit_the_job_is_refused() -> None:
    features, labels = data()

    def refuse(features: Any, labels: Any) -> None:
        with pytest.raises(VeilfedError) as refused:
            FedotTrainer(strategy(), features, labels, seed=1, institution="a")
        assert refused.value.code is Code.DATA_INVALID

    refuse(features[:, :8], labels)
    refuse(features[:0], labels[:0])
    refuse(features, labels[:-1])
    refuse(features, labels + 1)
    refuse(features, labels - 1)
    refuse(features, labels.astype(np.float64))


def test_models_that_do_not_fit_the_job_are_refused() -> None:
    features, labels = data()
    state = FedotState.initial(strategy())
    bad: list[Any] = [first_classifier()[:2], first_classifier()[:, :8], first_classifier().astype(np.float64)]
    for classifier in bad:
        with pytest.raises(VeilfedError) as refused:
            trainer().train(classifier, state, 0)
        assert refused.value.code is Code.INPUT_INVALID
    with pytest.raises(VeilfedError, match="transform"):
        trainer().train(first_classifier(), FedotState.initial(strategy(blocks=2)), 0)
    with pytest.raises(VeilfedError, match="transform"):
        evaluate(first_classifier(), np.zeros((2, 4, 4), np.float32), features, labels)


def test_the_weight_is_one_or_the_number_of_samples() -> None:
    assert update_weight(strategy(), 123) == 1.0
    assert update_weight(strategy(weighting="samples"), 123) == 123.0
