import json
from typing import Any

import pytest

from veilfed.errors import Code, VeilfedError
from veilfed.jobs import parse_job


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
    ("changes", "words"),
    [
        ({"strategy__name": "unknown"}, "strategy.name"),
        ({"strategy__blocks": 3}, "must divide"),
        ({"strategy__classes": ["a"]}, "strategy.classes"),
        ({"strategy__classes": ["a", "a"]}, "distinct"),
        ({"strategy__temperature": float("nan")}, "strategy.temperature"),
        ({"cohort__train": []}, "cohort.train"),
        ({"cohort__evaluate": ["one"]}, "once only"),
        ({"cohort__train": ["Not A Label"]}, "cohort.train.0"),
        ({"quorum": 3}, "quorum"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": 10**9}, "rounds"),
        ({"fold__fraction_bits": 48, "fold__max_abs": 1e9}, "overflow"),
        ({"fold__max_weight": 10.0}, "max_weight"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_bad_job_is_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as refused:
        parse_job(json.dumps(document(**changes)))
    assert refused.value.code is Code.JOB_INVALID
