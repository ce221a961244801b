"""Logs are JSON lines on standard error, also from loggers that were made before the configuration."""

import json
import subprocess
import sys

PROGRAM = """
from veilfed import logs
log = logs.get_logger("made.at.import")
logs.configure("info")
log.debug("not shown")
log.info("shown", number=1)
"""


def test_standard_output_stays_clean() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    document = json.loads(line)
    assert document.pop("timestamp")
    assert document == {"component": "made.at.import", "event": "shown", "level": "info", "number": 1}
