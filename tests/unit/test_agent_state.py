"""What the agent keeps: whole or not at all, bound to what was consented to, one process at a time."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from client_agent.state import Counts, Finished, JobFolder, StateFolder
from tests.support.processes import until
from veilfed.errors import Code, VeilfedError
from veilfed.wire.tensors import digest

SPEC = {
    "name": "small",
    "strategy": {"name": "fedot", "classes": ["a", "b"], "dimension": 4},
    "cohort": {"train": ["north"]},
    "rounds": 3,
    "quorum": 1,
}
SPEC_JSON = json.dumps(SPEC)


def finished(round_number: int, previous: int, model: bytes = b"model") -> Finished:
    return Finished(
        round=round_number,
        previous=previous,
        trained=True,
        model_sha256=digest(model),
        weight=1.0,
        evaluations=(Counts("personal", 3, 4), Counts("global", 2, 4)),
        model=model,
        update=b"update",
        state=b"state" * round_number,
    )


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return StateFolder(tmp_path / "state").job("small-1")


def test_a_result_comes_back_as_it_was(folder: JobFolder) -> None:
    assert folder.finished(0) is None
    assert folder.latest() is None
    assert folder.before(0) is None
    folder.save(finished(0, -1))
    assert folder.finished(0) == finished(0, -1)
    assert folder.before(1) == finished(0, -1)
    # A round does not start from its own result.
    assert folder.before(0) is None


def test_two_results_are_kept(folder: JobFolder) -> None:
    for number in range(5):
        folder.save(finished(number, number - 1))
    assert folder.rounds() == [3, 4]
    assert folder.before(4) == finished(3, 2)
    assert folder.latest() == finished(4, 3)
    with pytest.raises(VeilfedError, match="round 3 is past") as caught:
        folder.before(3)
    assert caught.value.code is Code.TASK_INVALID


def test_a_history_that_the_aggregator_lost_is_replaced(folder: JobFolder) -> None:
    for number in range(3):
        folder.save(finished(number, number - 1))
    folder.save(finished(2, 1, b"another model"))
    assert folder.finished(2) == finished(2, 1, b"another model")
    folder.save(finished(1, 0, b"another model"))
    assert folder.rounds() == [1]


def test_every_changed_byte_is_found(folder: JobFolder) -> None:
    data = finished(1, 0).to_bytes()
    assert Finished.from_bytes(data, "here") == finished(1, 0)
    for position in range(len(data)):
        changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises(VeilfedError, match="here") as caught:
            Finished.from_bytes(changed, "here")
        assert caught.value.code is Code.STATE_CORRUPT
    for length in range(len(data)):
        with pytest.raises(VeilfedError):
            Finished.from_bytes(data[:length], "here")


def test_an_empty_result(folder: JobFolder) -> None:
    nothing = replace(finished(3, -1), trained=False, weight=0.0, evaluations=(), model=b"", update=b"", state=b"")
    folder.save(nothing)
    assert folder.finished(3) == nothing


def test_files_are_private(folder: JobFolder) -> None:
    folder.offer(SPEC_JSON)
    folder.approve()
    folder.save(finished(0, -1))
    for path in folder.path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.parent.stat().st_mode & 0o777 == 0o700


def test_consent_is_bound_to_the_specification(folder: JobFolder) -> None:
    with pytest.raises(VeilfedError, match="not offered") as caught:
        folder.approve()
    assert caught.value.code is Code.NOT_FOUND
    assert folder.offer(SPEC_JSON).name == "small"
    assert not folder.approved
    folder.approve()
    assert folder.approved
    with pytest.raises(VeilfedError, match="was changed") as caught:
        folder.offer(json.dumps({**SPEC, "rounds": 4}))
    assert caught.value.code is Code.JOB_INVALID
    (folder.path / "spec.json").write_text(json.dumps({**SPEC, "rounds": 4}))
    assert not folder.approved


def test_a_bad_specification_is_not_kept(folder: JobFolder) -> None:
    with pytest.raises(VeilfedError) as caught:
        folder.offer("{}")
    assert caught.value.code is Code.JOB_INVALID
    assert not folder.path.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\n", "x" * 129])
def test_odd_job_ids_make_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(VeilfedError) as caught:
        StateFolder(tmp_path).job(name)
    assert caught.value.code is Code.INPUT_INVALID


def test_purge(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    for name in ("one", "two"):
        state.job(name).offer(SPEC_JSON)
    assert [folder.job_id for folder in state.jobs()] == ["one", "two"]
    state.job("one").purge()
    assert [folder.job_id for folder in state.jobs()] == ["two"]
    # A kill in the middle of a purge.
    state.job("two").path.rename(tmp_path / "jobs" / ".purged-two")
    assert state.jobs() == []
    with state.locked():
        assert list((tmp_path / "jobs").iterdir()) == []


def test_one_process_per_folder(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    with state.locked():
        with pytest.raises(VeilfedError, match="another agent") as caught, state.locked():
            pass
        assert caught.value.code is Code.FILE_UNUSABLE
    with state.locked():
        pass


WRITER = """
import sys
from pathlib import Path
from client_agent.state import Finished, StateFolder
from veilfed.wire.tensors import digest
folder = StateFolder(Path(sys.argv[1])).job("small-1")
number = 0
while True:
    fill = bytes([number % 256]) * 200_000
    folder.save(Finished(number, number - 1, True, digest(fill), 1.0, (), fill, fill, fill))
    number += 1
"""


def _moved(folder: JobFolder, before: Finished | None) -> bool:
    """Whether another round than before is the newest."""
    return folder.rounds()[-1:] not in ([], [before.round if before else -1])


def test_killed_at_any_instant(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).job("small-1")
    for attempt in range(5):
        before = folder.latest()
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) as writer:
            # Each run starts from round 0 again and drops what is later; the poll ends it at another instant each time.
            until(partial(_moved, folder, before), 30, "the writer writes", interval=0.001 * attempt)
            writer.send_signal(signal.SIGKILL)
        rounds = folder.rounds()
        assert rounds
        for number in rounds:
            kept = folder.finished(number)
            assert kept is not None
            assert kept.model == kept.update == kept.state == bytes([number % 256]) * 200_000
        # The newest is there, and (but for the first) the one before: a restart goes on from it.
        latest = folder.latest()
        assert latest is not None
        if latest.round:
            assert folder.before(latest.round) is not None
