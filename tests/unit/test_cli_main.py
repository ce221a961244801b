"""The command line as a whole: exit codes, help, what a missing party says."""

import json
import subprocess
import sys

import pytest

from tests.support.processes import veilfed
from veilfed import __version__
from veilfed.errors import Code


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(veilfed(*arguments), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["unknown"],
        ["pki", "unknown"],
        ["pki", "init"],
        ["demo", "--rounds", "x"],
        ["demo", "--rounds", "0"],
        ["--nope"],
    ],
)
def test_a_wrong_use_ends_with_2_and_no_traceback(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Usage" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version_end_with_0() -> None:
    assert run("--help").returncode == 0
    assert run("--version").stdout.strip() == __version__


def test_an_error_with_json_is_one_document() -> None:
    done = run("pki", "show", "/nowhere", "--json")
    assert json.loads(done.stderr)["error"] == "FILE_UNUSABLE"


HIDING = """
import sys

hidden = sys.argv.pop(1)

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == hidden:
            raise ModuleNotFoundError("no module named " + name, name=hidden)

sys.meta_path.insert(0, Hidden())
from veilfed.cli.main import main
main()
"""


@pytest.mark.parametrize(("hidden", "party"), [("torch", "oracle"), ("torch", "agent"), ("sqlalchemy", "aggregator")])
def test_a_party_whose_extra_is_missing_says_so_and_the_rest_works(hidden: str, party: str) -> None:
    """A package is hidden from the import system, as if it were not installed."""

    def run_without(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", HIDING, hidden, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run_without("--version").stdout.strip() == __version__
    served = run_without(party, "serve", "--config", "missing.yaml")
    assert served.returncode == Code.PACKAGE_MISSING.exit_code, served.stderr
    assert hidden in served.stderr
    assert "Traceback" not in served.stderr
