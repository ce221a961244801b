"""The page of complaints names tests that exist, for all twelve groups."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "complaints.md"
ROWS = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`( \(slow\))?")


def _tests(path: str) -> dict[str, bool]:
    """name -> whether it is marked slow as a whole."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        node.name: any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in node.decorator_list)
        for node in functions
    }


def test_there_are_twelve_groups() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, 13))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"group{row.split('|')[1].strip()}")
def test_each_group_names_tests_that_exist_and_run_each_time(row: str) -> None:
    named = NAMED.findall(row)
    assert named
    assert len(named) == row.count("::"), "a name that is not in the form of a test"
    for path, name, slow in named:
        assert _tests(path)[name] == bool(slow), f"{path}::{name}"
    assert any(not slow for _, _, slow in named)
