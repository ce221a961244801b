"""A ledger whose process is killed in the middle of writing."""

import subprocess
import sys
from pathlib import Path

from veilfed.ledger import Ledger, verify

WRITER = """
import sys
from pathlib import Path
from veilfed.ledger import Ledger

with Ledger.open(Path(sys.argv[1])) as ledger:
    while True:
        head = ledger.append({"kind": "message", "decision": "passed", "text": "x" * 2000})
        sys.stdout.write(f"{head.records}:{head.sha256}\\n")
        sys.stdout.flush()
"""


def test_every_record_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    known = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        process.kill()
        last = process.stdout.read().splitlines(keepends=True)
        process.wait()
        process.stdout.close()
        whole = [line for line in last if line.endswith(b"\n")]
        with Ledger.open(path) as ledger:
            assert ledger.head.records >= known + 50
            if whole:
                records, _, sha256 = whole[-1].decode().strip().partition(":")
                assert ledger.head.records >= int(records)
                digests = {record_sha256(line) for line in path.read_bytes().splitlines()}
                assert sha256 in digests
            known = ledger.head.records
    assert verify(path).head.records == known


def record_sha256(line: bytes) -> str:
    return line.partition(b'"sha256":"')[2][:64].decode()
