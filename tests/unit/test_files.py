import os
import stat
from pathlib import Path

import pytest

from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic


def test_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"a longer first content")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_mode_is_as_asked_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "file", b"", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_reader_that_has_the_old_file_open_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with path.open("rb") as reader:
        write_atomic(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"


def test_a_failure_names_the_path_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    folder = tmp_path / "a folder in the way"
    folder.mkdir()
    with pytest.raises(VeilfedError, match="in the way") as refused:
        write_atomic(folder, b"content")
    assert refused.value.code is Code.FILE_UNUSABLE
    assert [entry.name for entry in tmp_path.iterdir()] == ["a folder in the way"]
