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


FAILING = """
from veilfed import logs
log = logs.get_logger("service")
logs.configure("info")

def handle(text):
    try:
        raise KeyError(text)
    except KeyError:
        raise ValueError("bad: " + text)

try:
    handle("private " + "words")
except ValueError as error:
    log.error("given", exc_info=error)
    log.error("current", exc_info=True)
    log.exception("exception")
"""


def test_an_exception_is_told_by_type_and_place_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, check=True, timeout=60)
    assert "private words" not in done.stderr
    documents = [json.loads(line) for line in done.stderr.splitlines()]
    assert [document["event"] for document in documents] == ["given", "current", "exception"]
    for document in documents:
        assert "exc_info" not in document
        assert [error["type"] for error in document["exception"]] == ["ValueError", "KeyError"]
        assert document["exception"][0]["frames"][-1] == "<string>:10 handle"
