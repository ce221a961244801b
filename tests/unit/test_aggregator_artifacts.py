"""Content-addressed files and resumable uploads."""

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from aggregator.artifacts import MAX_UPLOADS, Artifacts, Ref
from veilfed.errors import Code, VeilfedError
from veilfed.protocol import CHUNK_BYTES

DATA = bytes(range(256)) * 40
REF = Ref(hashlib.sha256(DATA).hexdigest(), len(DATA))


@pytest.fixture
def artifacts(tmp_path: Path) -> Iterator[Artifacts]:
    opened = Artifacts.open(tmp_path / "artifacts")
    yield opened
    opened.close()


def model_file(folder: Path, ref: Ref) -> Path:
    (found,) = folder.rglob(ref.sha256)
    return found


def refused(code: Code) -> "pytest.RaisesExc[VeilfedError]":
    return pytest.raises(VeilfedError, check=lambda error: error.code is code)


def test_models(artifacts: Artifacts, tmp_path: Path) -> None:
    ref = artifacts.put_model(DATA)
    assert ref == REF
    assert artifacts.put_model(DATA) == ref
    assert artifacts.model(ref.sha256) == DATA
    assert b"".join(artifacts.chunks(ref.sha256, 5)) == DATA[5:]
    assert model_file(tmp_path, ref).stat().st_mode & 0o777 == 0o600


def test_chunks_are_small(artifacts: Artifacts) -> None:
    data = b"x" * (2 * CHUNK_BYTES + 7)
    chunks = [len(chunk) for chunk in artifacts.chunks(artifacts.put_model(data).sha256, 0)]
    assert chunks == [CHUNK_BYTES, CHUNK_BYTES, 7]


def test_a_damaged_model_is_noticed(artifacts: Artifacts, tmp_path: Path) -> None:
    ref = artifacts.put_model(DATA)
    model_file(tmp_path, ref).write_bytes(DATA[:-1])
    with refused(Code.STATE_CORRUPT):
        artifacts.model(ref.sha256)


def test_one_process_at_a_time(artifacts: Artifacts, tmp_path: Path) -> None:
    with refused(Code.FILE_UNUSABLE):
        Artifacts.open(tmp_path / "artifacts")


def test_what_a_crash_left_half_written_goes(artifacts: Artifacts, tmp_path: Path) -> None:
    ref = artifacts.put_model(DATA)
    model = model_file(tmp_path, ref)
    half = model.with_name(f".{model.name}.abc.tmp")
    half.write_bytes(DATA[:100])
    artifacts.close()
    again = Artifacts.open(tmp_path / "artifacts")
    assert not half.exists()
    assert again.model(ref.sha256) == DATA
    again.close()


def test_an_upload_in_two_parts(artifacts: Artifacts) -> None:
    assert artifacts.arrived("job", "north", REF.sha256) == (0, False)
    first = artifacts.upload("job", "north", REF, 0)
    first.write(DATA[:1000])
    assert not first.finish()
    artifacts.release(first)
    assert artifacts.arrived("job", "north", REF.sha256) == (1000, False)
    with refused(Code.ARTIFACT_INVALID):
        artifacts.uploaded("job", "north", REF.sha256)
    second = artifacts.upload("job", "north", REF, 1000)
    second.write(DATA[1000:])
    assert second.finish()
    artifacts.release(second)
    assert artifacts.arrived("job", "north", REF.sha256) == (REF.size, True)
    assert artifacts.uploaded("job", "north", REF.sha256) == DATA
    # Nobody else's.
    assert artifacts.arrived("job", "south", REF.sha256) == (0, False)


def test_what_an_upload_may_not_do(artifacts: Artifacts) -> None:
    with refused(Code.ARTIFACT_INVALID):
        artifacts.upload("job", "north", REF, 1)
    upload = artifacts.upload("job", "north", REF, 0)
    with refused(Code.ARTIFACT_INVALID):
        upload.write(DATA + b"x")
    upload.write(b"y" + DATA[1:])
    with refused(Code.ARTIFACT_INVALID):
        upload.finish()
    artifacts.release(upload)
    assert artifacts.arrived("job", "north", REF.sha256) == (0, False)
    with refused(Code.ARTIFACT_INVALID):
        artifacts.upload("job", "north", Ref("../../x", 4), 0)


def test_a_new_upload_takes_over(artifacts: Artifacts) -> None:
    first = artifacts.upload("job", "north", REF, 0)
    first.write(DATA[:1000])
    second = artifacts.upload("job", "north", REF, 0)
    with refused(Code.CANCELLED):
        first.write(DATA[1000:])
    with refused(Code.CANCELLED):
        first.received = REF.size
        first.finish()
    second.write(DATA)
    assert second.finish()


class Waiting:
    """A digest that waits."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def update(self, _: bytes) -> None:
        self.begun.set()
        self.go_on.wait(60)


def test_an_earlier_part_that_is_read_holds_up_nobody(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes take seconds."""
    first = artifacts.upload("job", "north", REF, 0)
    first.write(DATA[:1000])
    artifacts.release(first)
    waiting = Waiting()
    with ThreadPoolExecutor(2) as threads:
        try:
            with monkeypatch.context() as patch:
                patch.setattr("aggregator.artifacts.hashlib", SimpleNamespace(sha256=lambda: waiting))
                resuming = threads.submit(artifacts.upload, "job", "north", REF, 1000)
                assert waiting.begun.wait(20)
            other = threads.submit(artifacts.upload, "job", "south", REF, 0).result(20)
        finally:
            waiting.go_on.set()
        resuming.result(20)
    other.write(DATA)
    assert other.finish()


def test_old_uploads_make_room(artifacts: Artifacts, tmp_path: Path) -> None:
    for index in range(MAX_UPLOADS + 3):
        data = bytes([index])
        upload = artifacts.upload("job", "north", Ref(hashlib.sha256(data).hexdigest(), 2), 0)
        upload.write(data)
        artifacts.release(upload)
    assert len(list((tmp_path / "artifacts" / "uploads" / "job" / "north").iterdir())) == MAX_UPLOADS


def test_updates_live_until_their_round_is_folded(artifacts: Artifacts) -> None:
    # An institution may send the same bytes in two rounds.
    for number in (0, 1):
        assert artifacts.put_update("job", number, "north", DATA) == REF.sha256
    artifacts.drop_updates("job", 0)
    with refused(Code.ARTIFACT_INVALID):
        artifacts.update("job", 0, "north", REF.sha256)
    assert artifacts.update("job", 1, "north", REF.sha256) == DATA
    assert artifacts.jobs() == {"job"}
    artifacts.drop_job("job")
    assert artifacts.jobs() == set()


def test_sealed_updates_stay_when_their_job_ends_until_they_are_dropped(tmp_path: Path) -> None:
    with closing(Artifacts.open(tmp_path)) as artifacts:
        first = artifacts.put_update("job", None, "north", b"sums of north")
        second = artifacts.put_update("job", None, "south", b"sums of south")
        artifacts.put_update("job", 0, "south", b"not sealed")
        artifacts.drop_updates("job", 0)
        artifacts.drop_job("job")
        assert artifacts.update("job", None, "north", first) == b"sums of north"
        assert artifacts.jobs() == {"job"}
        for path in (tmp_path / "sealed" / "job").iterdir():
            assert path.stat().st_mode & 0o077 == 0
        artifacts.drop_sealed("job", {("south", second)})
        assert artifacts.update("job", None, "south", second) == b"sums of south"
        with pytest.raises(VeilfedError) as gone:
            artifacts.update("job", None, "north", first)
        assert gone.value.code is Code.ARTIFACT_INVALID
        artifacts.drop_sealed("job", set())
        artifacts.drop_sealed("job", set())
        assert artifacts.jobs() == set()
