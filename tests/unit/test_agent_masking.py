"""With whom an agent adds up its values, and what it keeps of a masked round."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.config import SecureAggregationConfig
from client_agent.masking import check_secure, expectation
from client_agent.state import StateFolder
from tests.support.methods import DIMENSION, job, strategy
from veilfed.errors import Code, VeilfedError

NAMES = ("one", "two", "four", "five")


def config(*roster: str, **values: Any) -> SecureAggregationConfig:
    return SecureAggregationConfig(roster=list(roster), **values)


def masked(name: str = "fedot") -> Any:
    return job(strategy(name), NAMES, secure_aggregation={}, quorum=3)


def denied(spec: Any, own: SecureAggregationConfig | None, words: str) -> None:
    with pytest.raises(VeilfedError, match=words) as caught:
        check_secure(spec, own, "one")
    assert caught.value.code is Code.POLICY_DENIED


def test_those_of_the_job_that_are_on_the_roster() -> None:
    assert check_secure(masked(), config("two", "four", "six"), "one") == {"one", "two", "four"}
    assert check_secure(masked(), config(*NAMES, min_cohort=4), "one") == set(NAMES)


def test_jobs_that_are_refused() -> None:
    denied(masked(), None, "needs a roster")
    denied(masked(), config("two", "six"), "2 institutions of the job are on the roster; at least 3")
    denied(masked(), config(*NAMES, min_cohort=5), "at least 5")
    denied(job(strategy("fedot")), config(*NAMES, required=True), "without secure aggregation are not allowed")


def test_jobs_without_it() -> None:
    assert check_secure(job(strategy("fedot")), None, "one") == set()
    assert check_secure(job(strategy("fedot")), config(*NAMES), "one") == set()
    # Counts alone are no values that could be added up.
    assert check_secure(job(strategy("all-local")), config(*NAMES, required=True), "one") == set()


def test_what_leaves_in_a_round() -> None:
    ((name, (shape, dtype)),) = expectation(masked(), 0).items()
    assert (name, shape, np.dtype(dtype).name) == ("masked", (3 * DIMENSION + 1,), "uint64")
    assert [*expectation(job(strategy("fedot")), 0)] == ["classifier"]


def test_secrets_are_kept_whole_and_for_the_owner_alone(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).job("job-1")
    assert folder.masking() is None
    folder.keep_masking(b"secrets")
    assert folder.masking() == b"secrets"
    path = folder.path / "masking.bin"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VeilfedError) as caught:
        folder.masking()
    assert caught.value.code is Code.STATE_CORRUPT
