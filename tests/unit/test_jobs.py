import json
from typing import Any

import pytest

from veilfed.errors import Code, VeilfedError
from veilfed.jobs import parse_job

MANY = [f"institution-{number}" for number in range(12_000)]


def document(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "name": "trial",
        "strategy": {"name": "fedot", "classes": ["a", "b"], "dimension": 8, "blocks": 2},
        "cohort": {"train": ["one", "two"], "evaluate": ["three"]},
        "rounds": 3,
        "quorum": 2,
    }
    for path, value in changes.items():
        *parents, key = path.split("__")
        target = spec
        for parent in parents:
            target = target.setdefault(parent, {})
        target[key] = value
    return spec


def test_a_job_survives_its_own_json() -> None:
    spec = parse_job(json.dumps(document()))
    assert parse_job(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"name": "all-global", "blocks": 3}, "must divide"),
        ({"name": "fedgh", "blocks": 3}, "must divide"),
        ({"name": "fedlt", "blocks": 2}, "strategy.blocks"),
        ({"name": "all-local", "transform": "identity"}, "strategy.transform"),
        ({"name": "all-local", "weighting": "samples"}, "strategy.weighting"),
        ({"name": "fedgh", "weighting": "samples"}, "strategy.weighting"),
        ({"name": "fedgh", "header_steps": 0}, "strategy.header_steps"),
        ({"name": "fedadapter", "hidden": 0}, "strategy.hidden"),
        ({"name": "fedclip", "train_classifier": False}, "needs initial: class_vectors"),
        ({"name": "fedot", "initial": "class-vectors"}, "strategy.initial"),
        ({}, "strategy: .*'name'"),
    ],
)
def test_a_bad_method_is_refused_by_key(strategy: dict[str, Any], words: str) -> None:
    bad = document()
    bad["strategy"] = {"classes": ["a", "b"], "dimension": 8, **strategy}
    with pytest.raises(VeilfedError, match=words) as refused:
        parse_job(json.dumps(bad))
    assert refused.value.code is Code.JOB_INVALID
    for name in ("fedot", "fedgh", "fedlt", "fedadapter", "fedclip", "all-local", "all-global"):
        assert f"strategy.{name}" not in refused.value.message  # keys are named as they stand in the document


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy__name": "unknown"}, "strategy: .*'name'.*'fedot'"),
        ({"strategy__blocks": 3}, "must divide"),
        ({"strategy__classes": ["a"]}, "strategy.classes"),
        ({"strategy__classes": ["a", "a"]}, "distinct"),
        ({"strategy__temperature": float("nan")}, "strategy.temperature"),
        ({"cohort__train": []}, "cohort.train"),
        ({"cohort__evaluate": ["one"]}, "once only"),
        ({"cohort__train": ["Not A Label"]}, "cohort.train.0"),
        ({"quorum": 3}, "quorum"),
        ({"rounds": -1}, "rounds"),
        ({"rounds": 10**9}, "rounds"),
        ({"fold__fraction_bits": 48, "fold__max_abs": 1e9}, "overflow"),
        ({"fold__max_weight": 10.0}, "max_weight"),
        ({"surprise": 1}, "surprise"),
        (
            {"cohort__train": [f"t{n}" for n in range(6_000)], "cohort__evaluate": [f"e{n}" for n in range(6_000)]},
            "in all",
        ),
        ({"strategy__classes": ["a", "\N{SNOWMAN}" * 400_000]}, "longer than"),
    ],
)
def test_a_bad_job_is_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as refused:
        parse_job(json.dumps(document(**changes), ensure_ascii=False))
    assert refused.value.code is Code.JOB_INVALID


def test_the_ring_holds_the_largest_sum_however_it_is_rounded() -> None:
    """Each of 9,999 terms may be rounded up by half a step: 2^63 must stay out of reach, not just nearly."""
    clients = 9_999
    weight = (2.0**63 - 2_000) / clients / 2.0**8
    changes = {"strategy__weighting": "samples", "fold__max_abs": 1e7, "fold__fraction_bits": 8, "rounds": 1}
    for factor, allowed in ((1.0, False), (1 - 1e-9, True)):
        cohort = [f"t{number}" for number in range(clients)]
        document_ = document(**changes, cohort__train=cohort, fold__max_weight=weight / 1e7 * factor)
        if allowed:
            parse_job(json.dumps(document_, ensure_ascii=False))
        else:
            with pytest.raises(VeilfedError, match="overflow"):
                parse_job(json.dumps(document_, ensure_ascii=False))


PRIVATE = {
    "update": {"mode": "update", "noise_multiplier": 1.0, "clip": 0.5},
    "statistics": {"mode": "statistics", "noise_multiplier": 4.0},
    "sample": {"mode": "sample", "noise_multiplier": 1.0, "clip": 1.0, "sampling_rate": 0.1},
}
AFL = {"name": "afl", "classes": ["a", "b"], "dimension": 8}


@pytest.mark.parametrize("mode", PRIVATE)
def test_a_job_with_privacy_says_what_an_update_spends(mode: str) -> None:
    changes: dict[str, Any] = {"strategy": AFL, "rounds": 1} if mode == "statistics" else {"strategy__epochs": 2}
    spec = parse_job(json.dumps(document(privacy=PRIVATE[mode], **changes)))
    assert parse_job(spec.model_dump_json()) == spec
    assert spec.release is not None
    assert spec.release.steps == (20 if mode == "sample" else 1)
    assert parse_job(json.dumps(document())).release is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": PRIVATE["statistics"]}, "privacy.mode statistics is not for fedot"),
        ({"privacy": PRIVATE["update"], "strategy": AFL, "rounds": 1}, "privacy.mode update is not for afl"),
        ({"privacy": {**PRIVATE["update"], "sampling_rate": 0.1}}, "privacy.sampling_rate"),
        ({"privacy": {**PRIVATE["update"], "mode": "all"}}, "privacy"),
        ({"privacy": {**PRIVATE["update"], "noise_multiplier": 0}}, "privacy.noise_multiplier"),
        ({"privacy": {**PRIVATE["update"], "clip": 200}}, "would not pass fold.max_abs"),
        ({"privacy": PRIVATE["update"], "fold__max_norm": 5}, "would not pass fold.max_abs or fold.max_norm"),
        ({"privacy": PRIVATE["update"], "strategy__weighting": "samples", "fold__max_weight": 10}, "must be uniform"),
        (
            {"privacy": PRIVATE["statistics"], "strategy": {**AFL, "ridge": "gcv"}, "rounds": 1},
            "ridge must be a number",
        ),
        (
            {"privacy": {**PRIVATE["update"], "clip": 8}, "fold__fraction_bits": 45, "fold__max_abs": 1000},
            "too large for the ring",
        ),
    ],
)
def test_privacy_that_a_job_cannot_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as refused:
        parse_job(json.dumps(document(**changes)))
    assert refused.value.code is Code.JOB_INVALID


def test_noise_is_divided_where_the_sum_of_a_quorum_is_all_that_is_seen() -> None:
    afl = {"strategy": AFL, "rounds": 1, "cohort__train": MANY[:9], "quorum": 7}
    masked: dict[str, Any] = {"secure_aggregation": {}}
    for changes, parties in (
        ({"privacy": PRIVATE["statistics"]}, 1),
        ({"privacy": PRIVATE["statistics"], **masked}, 6),
        ({"privacy": {**PRIVATE["statistics"], "colluders": 3}, **masked}, 4),
        ({"privacy": {**PRIVATE["statistics"], "colluders": 8}, **masked}, 1),
        (masked, 1),
    ):
        assert parse_job(json.dumps(document(**afl, **changes))).noise_parties == parties
    # Float32 would round each update by itself: there every institution adds all of the noise.
    update = document(cohort__train=MANY[:9], quorum=7, privacy=PRIVATE["update"], **masked)
    assert parse_job(json.dumps(update)).noise_parties == 1
