"""Arbitrary and damaged files and texts: they are read, or refused with a typed error; nothing else happens."""

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from client_agent.cache import EmbeddingCache
from client_agent.state import Counts, Finished, JobFolder
from tests.support.aggregators import job_spec
from tests.support.fuzz import bounded_memory, changed, profile  # noqa: F401  used by being there
from veilfed.config import parse_yaml, read_text
from veilfed.errors import Code, VeilfedError
from veilfed.identity.authority import CertificateAuthority
from veilfed.identity.names import Identity, Role
from veilfed.identity.tokens import Token
from veilfed.jobs import parse_job
from veilfed.ledger import Ledger, verify

JOB = yaml.safe_dump(job_spec(["north"]))
# Pieces that YAML gives a meaning, and values that are no plain text or number.
PIECES = ["{", "}", "[", "]", ":", ": ", "- ", "\n", "  ", "&a", "*a", "!!set", "!!binary", "|", ">", "#", "?", "<<"]
VALUES = [".inf", "-.nan", "1e400", "0x7", "2001-02-30", "9" * 400, "\t", "\x85", "\ud7ff", '"\\ud800"', "~", "---"]
yaml_like = st.lists(st.sampled_from(PIECES + VALUES + JOB.split()), max_size=30).map("".join)


def outcome(function: Callable[[], Any], *codes: Code) -> bool:
    """Whether it works; anything but an error of these codes fails the test."""
    try:
        function()
    except VeilfedError as error:
        assert error.code in codes  # noqa: PT017  either outcome is right
        return False
    return True


def check_jobs(text: str) -> None:
    outcome(lambda: parse_yaml(text, "text"), Code.CONFIG_INVALID)
    outcome(lambda: parse_job(text, "text"), Code.JOB_INVALID)


@profile(150)
@given(st.one_of(yaml_like, changed(JOB.encode()).map(lambda data: data.decode(errors="replace"))))
def test_any_job_is_parsed_or_refused(text: str) -> None:
    check_jobs(text)


@pytest.mark.slow
@profile(150, slow=True)
@given(st.one_of(yaml_like, changed(JOB.encode()).map(lambda data: data.decode(errors="replace"))))
def test_many_more_jobs(text: str) -> None:
    check_jobs(text)


@pytest.mark.parametrize("key", ["rounds", "deadline_seconds", "strategy", "cohort", "name"])
@pytest.mark.parametrize("value", [".inf", ".nan", "9" * 400, "2001-01-01", "2001-02-30", "~", '"\\ud800"'])
def test_odd_values_are_refused_by_key(key: str, value: str) -> None:
    text = yaml.safe_dump({name: item for name, item in job_spec(["north"]).items() if name != key})
    with pytest.raises(VeilfedError) as refused:
        parse_job(f"{text}{key}: {value}\n", "job.yaml")
    assert refused.value.code is Code.JOB_INVALID


@profile(60)
@given(st.binary(max_size=60))
def test_any_bytes_of_a_configuration_are_text_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(data)
    outcome(lambda: parse_yaml(read_text(path), "file.yaml"), Code.CONFIG_INVALID)


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> str:
    authority = CertificateAuthority.create(tmp_path_factory.mktemp("authority") / "ca", "test.veilfed")
    identity = Identity("test.veilfed", Role.AGENT, "north", "agent")
    return authority.new_token(identity, "127.0.0.1:1", timedelta(hours=1)).text()


def test_any_text_is_a_token_or_refused(token: str) -> None:
    @profile(80)
    @given(st.one_of(st.text(max_size=60), st.text(max_size=60).map("veilfed1.".__add__), changed(token.encode())))
    def check(text: str | bytes) -> None:
        words = text if isinstance(text, str) else text.decode("latin-1")
        outcome(lambda: Token.parse(words), Code.TOKEN_INVALID)

    check()


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    with Ledger.open(path) as made:
        for number in range(3):
            made.append({"kind": "message", "bytes": number})
    return path.read_bytes()


def check_ledger(path: Path, data: bytes) -> None:
    """Verified or refused; a ledger that opens also goes on, and is sound afterwards."""

    def go_on() -> None:
        with Ledger.open(path) as opened:
            opened.append({"kind": "message"})

    path.write_bytes(data)
    outcome(lambda: verify(path), Code.LEDGER_BROKEN)
    if outcome(go_on, Code.LEDGER_BROKEN):
        assert verify(path).head.records >= 1
    else:
        assert path.read_bytes() == data


def test_any_ledger_is_sound_or_refused_and_not_touched(tmp_path: Path, ledger: bytes) -> None:
    @profile(60)
    @given(st.one_of(st.binary(max_size=80), changed(ledger)))
    def check(data: bytes) -> None:
        check_ledger(tmp_path / "ledger", data)

    check()


@pytest.mark.slow
def test_many_more_ledgers(tmp_path: Path, ledger: bytes) -> None:
    @profile(60, slow=True)
    @given(st.one_of(st.binary(max_size=80), changed(ledger)))
    def check(data: bytes) -> None:
        check_ledger(tmp_path / "ledger", data)

    check()


COUNTS = (Counts("global", 3, 4),)
FINISHED = Finished(1, 0, True, "ab" * 32, 1.0, COUNTS, b"model", b"update", b"state").to_bytes()


@profile(150)
@given(st.one_of(st.binary(max_size=80), changed(FINISHED)))
def test_any_result_of_a_round_is_whole_or_refused(data: bytes) -> None:
    if outcome(lambda: Finished.from_bytes(data, "round-1.bin"), Code.STATE_CORRUPT):
        assert data == FINISHED


@profile(80)
@given(st.sampled_from(["spec.json", "approval.json", "round-1.bin"]), st.binary(max_size=60))
def test_any_file_in_a_job_s_folder_is_read_or_refused(tmp_path: Path, name: str, data: bytes) -> None:
    folder = JobFolder(tmp_path / "job")
    folder.path.mkdir(exist_ok=True)
    (folder.path / "spec.json").write_text(JOB)
    (folder.path / "approval.json").write_text("{}")
    (folder.path / name).write_bytes(data)
    outcome(folder.spec, Code.STATE_CORRUPT, Code.JOB_INVALID)
    outcome(lambda: folder.approved, Code.STATE_CORRUPT)
    outcome(folder.latest, Code.STATE_CORRUPT)


@profile(100)
@given(st.data())
def test_any_embedding_cache_gives_right_embeddings_or_none(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "cache"
    shutil.rmtree(path, ignore_errors=True)
    right = np.array([[1, 2], [3, 4]], dtype=np.float32)
    with EmbeddingCache(path, "ab", "text", 2) as cache:
        cache.add(["a", "b"], right)
    whole = cache.path.read_bytes()
    cache.path.write_bytes(data.draw(st.one_of(changed(whole), st.binary(max_size=200))))
    with EmbeddingCache(path, "ab", "text", 2) as cache:
        found, absent = cache.get(["a", "b"])
        present = [row for row in range(2) if row not in absent]
        assert np.array_equal(found[present], right[present])
        cache.add(["a", "b"], right)
        assert np.array_equal(cache.get(["a", "b"])[0], right)
