import pickle
from pathlib import Path

import pytest

from veilfed.errors import Code, VeilfedError


def test_exit_codes_are_distinct_and_clear_of_the_shells_own() -> None:
    codes = [code.exit_code for code in Code]
    assert len(set(codes)) == len(codes)
    assert all(2 < code < 126 for code in codes)


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
def test_every_code_has_a_hint_that_is_a_sentence(code: Code) -> None:
    assert code.hint.endswith(".")


def test_an_error_crosses_processes_whole() -> None:
    error = VeilfedError(Code.DATA_INVALID, "row 3 has no label", "Add a label.")
    back = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert (back.code, back.message, back.hint) == (error.code, error.message, error.hint)


def test_the_reference_page_lists_the_catalogue_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "errors.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    listed = {row[0].strip("|` "): (int(row[1]), row[2].strip("`"), row[4].removesuffix(" |")) for row in rows}
    assert listed == {code.name: (code.exit_code, code.status.name, code.hint) for code in Code}
