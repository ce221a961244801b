"""The ledger: its chain, its recovery, and that no change of it goes unnoticed."""

import hashlib
import json
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.countersign import AGGREGATOR, Countersigner
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.ledger import EMPTY, Head, Ledger, canonical, head_statement, read, receipts_path, verify
from veilfed.ledger.chain import MAX_RECORD_BYTES

AGENT = Identity.parse("spiffe://test.veilfed/agent/north/main")
RECORDS = 12
# Receipts over the heads after these numbers of records.
COUNTERSIGNED = (4, 9)

quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def raises(code: Code, text: str = ".") -> Iterator[None]:
    with pytest.raises(VeilfedError, match=text) as caught:
        yield
    assert caught.value.code is code


def write(path: Path, records: int = RECORDS) -> None:
    with Ledger.open(path) as ledger:
        for number in range(records):
            ledger.append({"kind": "message", "decision": "passed", "bytes": number, "purpose": "update"})


@pytest.fixture(scope="module")
def signer() -> Countersigner:
    return Countersigner()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, signer: Countersigner) -> dict[str, bytes]:
    """The bytes of a ledger with two receipts, in it and beside it."""
    path = tmp_path_factory.mktemp("kept") / "ledger"
    with Ledger.open(path) as ledger, Ledger.open(receipts_path(path)) as receipts:
        ledger.append({"kind": "start", "identity": str(AGENT)})
        while ledger.head.records < RECORDS:
            head = ledger.append({"kind": "message", "decision": "passed", "bytes": 7})
            if head.records in COUNTERSIGNED:
                signed = signer.signed(AGENT, "job", head.records, head)
                receipts.append(signed.fields())
                ledger.append(signed.fields())
    return {"ledger": path.read_bytes(), "ledger.receipts": receipts_path(path).read_bytes()}


def lay(folder: Path, kept: dict[str, bytes], **changed: bytes) -> Path:
    """Writes the kept files, with the changed ones in place of theirs."""
    for name, data in kept.items():
        (folder / name).write_bytes(data)
    for name, data in changed.items():
        (folder / {"ledger": "ledger", "receipts": "ledger.receipts"}[name]).write_bytes(data)
    return folder / "ledger"


def rechained(lines: list[bytes]) -> bytes:
    """The records of some lines, numbered and chained anew: what a forger with the source code can make."""
    head, made = EMPTY, b""
    for line in lines:
        record = json.loads(line)
        del record["sha256"]
        record |= {"seq": head.records + 1, "previous": head.sha256}
        head = Head(head.records + 1, hashlib.sha256(canonical(record)).hexdigest())
        made += canonical({**record, "sha256": head.sha256}) + b"\n"
    return made


def test_a_sound_ledger_verifies(tmp_path: Path, kept: dict[str, bytes], signer: Countersigner) -> None:
    summary = verify(lay(tmp_path, kept), bundle_pem=signer.bundle)
    assert summary.head.records == RECORDS
    assert summary.countersigned == COUNTERSIGNED[-1]
    assert summary.receipts == len(COUNTERSIGNED)
    assert summary.signers == [str(AGGREGATOR)]
    assert summary.identity == str(AGENT)
    assert summary.signers_checked


def test_reopening_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger"
    write(path, 3)
    seen: list[int] = []
    with Ledger.open(path, lambda record: seen.append(record["seq"])) as ledger:
        assert ledger.append({"kind": "note"}).records == 4
        assert ledger.path == path
    assert seen == [1, 2, 3]
    assert [record["seq"] for record in read(path)] == [1, 2, 3, 4]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_head_statement_is_fixed() -> None:
    assert head_statement(AGENT, "job-1", 3, Head(2, "ab")) == (
        b'{"head":{"records":2,"sha256":"ab"},"identity":"spiffe://test.veilfed/agent/north/main",'
        b'"job_id":"job-1","round":3}'
    )


def test_a_ledger_knows_its_past_heads(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger.open(path) as ledger:
        heads = [ledger.append({"kind": "note"}) for _ in range(3)]
        others = [Head(0, heads[0].sha256), Head(2, heads[0].sha256), Head(4, heads[2].sha256), Head(-1, "")]
        others += [Head(2, "0" * 64), Head(2, "f" * 64)]
        assert all(ledger.holds(head) for head in [EMPTY, *heads])
        assert not any(ledger.holds(head) for head in others)
    with Ledger.open(path) as ledger:  # it reads the file for heads before this start
        assert all(ledger.holds(head) for head in [EMPTY, *heads])
        assert not any(ledger.holds(head) for head in others)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger"), raises(Code.FILE_UNUSABLE, "another process"):
        Ledger.open(tmp_path / "ledger")


def test_threads_share_a_ledger(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:

        def append() -> None:
            for _ in range(100):
                ledger.append({"kind": "note"})

        threads = [threading.Thread(target=append) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verify(tmp_path / "ledger").head.records == 400


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_an_interrupted_write_is_cut_and_noted(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "ledger"
    write(path, 3)
    path.write_bytes(path.read_bytes()[:-cut])
    with raises(Code.LEDGER_BROKEN, "record 3"):
        verify(path)
    with Ledger.open(path) as ledger:
        assert ledger.head.records == 3
    assert [record["kind"] for record in read(path)] == ["message", "message", "recovered"]
    assert verify(path).recovered == 1


def test_a_failed_write_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger.open(path) as ledger:
        head = ledger.append({"kind": "note"})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
            with raises(Code.FILE_UNUSABLE):
                ledger.append({"kind": "note"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert ledger.head == head
        ledger.append({"kind": "note"})
    assert verify(path).head.records == 2


def test_what_is_no_record_is_not_appended(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger") as ledger:
        with raises(Code.INPUT_INVALID):
            ledger.append({"seq": 7})
        with raises(Code.INPUT_INVALID):
            ledger.append({"text": "x" * 70_000})
    with raises(Code.FILE_UNUSABLE, "closed"):
        ledger.append({"kind": "note"})
    assert verify(tmp_path / "ledger").head == EMPTY


def test_the_longest_record_can_be_read_back(tmp_path: Path) -> None:
    first, path = tmp_path / "first", tmp_path / "ledger"
    with Ledger.open(first) as ledger:
        ledger.append({"text": ""})
    room = MAX_RECORD_BYTES - first.stat().st_size
    with Ledger.open(path) as ledger:
        with raises(Code.INPUT_INVALID, f"a record of {MAX_RECORD_BYTES + 1} bytes"):
            ledger.append({"text": "x" * (room + 1)})
        ledger.append({"text": "x" * room})
    assert path.stat().st_size == MAX_RECORD_BYTES
    with Ledger.open(path) as ledger:
        assert ledger.append({"text": "y"}).records == 2
    assert verify(path).head.records == 2


@pytest.mark.parametrize("after", [b"x", b"\n", b"x\n", b"x" * MAX_RECORD_BYTES])
def test_a_line_that_is_too_long_is_not_taken_for_an_interrupted_write(tmp_path: Path, after: bytes) -> None:
    path = tmp_path / "ledger"
    write(path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * MAX_RECORD_BYTES + after)
    kept = path.read_bytes()
    with raises(Code.LEDGER_BROKEN, "record 2 is incomplete or too long|record 2 is not a record"):
        Ledger.open(path)
    assert path.read_bytes() == kept


def test_opening_a_changed_ledger_fails(tmp_path: Path, kept: dict[str, bytes]) -> None:
    path = lay(tmp_path, kept, ledger=kept["ledger"].replace(b'"bytes":7', b'"bytes":8', 1))
    with raises(Code.LEDGER_BROKEN, "record 2 was changed"):
        Ledger.open(path)


@quick
@given(data=st.data())
def test_any_changed_byte_is_found(tmp_path: Path, kept: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(kept)))
    place = data.draw(st.integers(0, len(kept[name]) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != kept[name][place]))
    changed = kept[name][:place] + bytes([value]) + kept[name][place + 1 :]
    path = lay(tmp_path, {**kept, name: changed})
    with raises(Code.LEDGER_BROKEN):
        verify(path)


@quick
@given(data=st.data())
def test_any_removed_or_moved_record_is_found(tmp_path: Path, kept: dict[str, bytes], data: st.DataObject) -> None:
    lines = kept["ledger"].splitlines(keepends=True)
    order = data.draw(st.permutations(range(len(lines))))
    kept_lines = order[: data.draw(st.integers(0, len(lines)))]
    left = b"".join(lines[index] for index in kept_lines)
    path = lay(tmp_path, kept, ledger=left)
    # At the end, where no receipt speaks of the records, a removal cannot show.
    if kept_lines == list(range(len(kept_lines))) and len(kept_lines) >= COUNTERSIGNED[-1]:
        assert verify(path).head.records == len(kept_lines)
        return
    with raises(Code.LEDGER_BROKEN, r"record \d+"):
        verify(path)


@quick
@given(data=st.data())
def test_a_repeated_record_is_found(tmp_path: Path, kept: dict[str, bytes], data: st.DataObject) -> None:
    lines = kept["ledger"].splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 1))
    path = lay(tmp_path, kept, ledger=b"".join([*lines[: index + 1], lines[index], *lines[index + 1 :]]))
    with raises(Code.LEDGER_BROKEN, f"record {index + 2} is out of order"):
        verify(path)


@quick
@given(data=st.data())
def test_a_tail_cut_below_a_receipt_is_found(tmp_path: Path, kept: dict[str, bytes], data: st.DataObject) -> None:
    lines = kept["ledger"].splitlines(keepends=True)
    countersigned = sum(len(line) for line in lines[: COUNTERSIGNED[-1]])
    path = lay(tmp_path, kept, ledger=kept["ledger"][: data.draw(st.integers(0, countersigned - 1))])
    with raises(Code.LEDGER_BROKEN, r"record \d+ is (missing|incomplete)"):
        verify(path)


@quick
@given(data=st.data())
def test_a_chain_made_anew_is_found(tmp_path: Path, kept: dict[str, bytes], data: st.DataObject) -> None:
    lines = kept["ledger"].splitlines(keepends=True)
    index = data.draw(st.integers(0, COUNTERSIGNED[-1] - 1).filter(lambda index: b'"bytes":7' in lines[index]))
    if data.draw(st.booleans()):
        lines[index] = lines[index].replace(b'"bytes":7', b'"bytes":8')
    else:
        del lines[index]
    path = lay(tmp_path, kept, ledger=rechained(lines))
    with raises(Code.LEDGER_BROKEN, r"the receipt of round \d+ of job job (says|speaks)"):
        verify(path)


def test_cut_or_missing_receipts_are_found(tmp_path: Path, kept: dict[str, bytes]) -> None:
    first = kept["ledger.receipts"].splitlines(keepends=True)[0]
    path = lay(tmp_path, kept, receipts=first)
    with raises(Code.LEDGER_BROKEN, "round 9 of job job is not in the file of receipts"):
        verify(path)
    receipts_path(path).unlink()
    with raises(Code.LEDGER_BROKEN, "is not in the file of receipts"):
        verify(path)


def test_a_head_known_from_elsewhere_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    write(path, 3)
    head = verify(path).head
    assert verify(path, expected=head).head == head
    write(path, 1)
    assert verify(path, expected=head).head.records == 4
    with raises(Code.LEDGER_BROKEN, "record 5 is missing: the given head"):
        verify(path, expected=Head(9, head.sha256))
    with raises(Code.LEDGER_BROKEN, "record 3 is not the one"):
        verify(path, expected=Head(3, "0" * 64))


def receipt_only(path: Path, signer: Countersigner, agent: Identity = AGENT) -> Path:
    """A ledger of one record with a receipt of `signer` beside it."""
    write(path, 1)
    with Ledger.open(receipts_path(path)) as receipts:
        receipts.append(signer.signed(agent, "job", 0, verify(path).head).fields())
    return path


def test_who_signed_is_proved_by_the_bundle_alone(tmp_path: Path, signer: Countersigner) -> None:
    path = receipt_only(tmp_path / "ledger", Countersigner())
    assert not verify(path).signers_checked
    with raises(Code.LEDGER_BROKEN, "was not issued under the bundle's roots"):
        verify(path, bundle_pem=signer.bundle)


def test_a_certificate_must_be_valid_when_it_signs(tmp_path: Path) -> None:
    old = Countersigner(start=datetime.now(UTC) - timedelta(days=9), days=1)
    path = receipt_only(tmp_path / "ledger", old)
    with raises(Code.LEDGER_BROKEN, "was not issued under the bundle's roots"):
        verify(path, bundle_pem=old.bundle)


def test_only_an_aggregator_countersigns(tmp_path: Path) -> None:
    path = receipt_only(tmp_path / "ledger", Countersigner(AGENT))
    with raises(Code.LEDGER_BROKEN, "not an aggregator's"):
        verify(path)


def test_a_receipt_of_another_identity_is_found(tmp_path: Path, signer: Countersigner) -> None:
    path = tmp_path / "ledger"
    with Ledger.open(path) as ledger:
        ledger.append({"kind": "start", "identity": str(AGENT)})
        other = signer.signed("spiffe://test.veilfed/agent/south/main", "job", 0, ledger.head)
    with Ledger.open(receipts_path(path)) as receipts:
        receipts.append(other.fields())
    with raises(Code.LEDGER_BROKEN, "another identity"):
        verify(path)


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_a_record_that_is_numbered_otherwise_is_found(tmp_path: Path, number: int) -> None:
    path = tmp_path / "ledger"
    write(path, 2)
    first, second = path.read_bytes().splitlines(keepends=True)
    record = {**json.loads(second), "seq": number}
    del record["sha256"]
    sha256 = hashlib.sha256(canonical(record)).hexdigest()
    path.write_bytes(first + canonical({**record, "sha256": sha256}) + b"\n")
    for check in (verify, Ledger.open):
        with raises(Code.LEDGER_BROKEN, "record 2 is out of order"):
            check(path)


@pytest.mark.parametrize("time", [None, 5, "yesterday", "2026-01-05T09:30:00"])
def test_a_record_says_when_it_was_written(tmp_path: Path, time: object) -> None:
    record = {"seq": 1, "previous": EMPTY.sha256, "kind": "note"} | ({} if time is None else {"time": time})
    sha256 = hashlib.sha256(canonical(record)).hexdigest()
    path = tmp_path / "ledger"
    path.write_bytes(canonical({**record, "sha256": sha256}) + b"\n")
    for check in (verify, Ledger.open):
        with raises(Code.LEDGER_BROKEN, "record 1"):
            check(path)
