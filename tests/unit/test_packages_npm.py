"""npm packages and reading what was fetched. npm is a stand-in that answers with an archive of ours."""

import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from veilfed.errors import Code, VeilfedError
from veilfed.packages import PackageFile, fetch, locate, read

CONTENT = b'{"icons": {}}'
ICONS = PackageFile("npm", "@scope/icons", "1.2.3", "package/icons.json", hashlib.sha256(CONTENT).hexdigest())

STAND_IN = f"""#!{sys.executable}
import pathlib, shutil, sys
if sys.argv[1] != "pack" or sys.argv[-1] != "@scope/icons@1.2.3" or "--ignore-scripts" not in sys.argv:
    sys.exit(1)
target = next(word.split("=")[1] for word in sys.argv if word.startswith("--pack-destination="))
shutil.copy(pathlib.Path(__file__).parent / "scope-icons-1.2.3.tgz", target)
"""


@pytest.fixture
def stand_in_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only `npm` on the PATH; returns the archive that it gives."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "npm"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    archive = folder / "scope-icons-1.2.3.tgz"
    with tarfile.open(archive, mode="w:gz") as tar:
        for name, data in {"package/icons.json": CONTENT, "package/index.js": b"never run"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return archive


def test_a_file_of_an_npm_package_is_fetched_once(stand_in_npm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    assert fetch([ICONS], folder) == {ICONS: locate(ICONS, folder)}
    assert read(ICONS, folder) == CONTENT
    assert [path for path in folder.rglob("*") if path.is_file()] == [locate(ICONS, folder)]
    stand_in_npm.unlink()
    fetch([ICONS], folder)  # needs no npm any more


def test_a_failing_npm_is_a_failed_download(stand_in_npm: Path, tmp_path: Path) -> None:
    stand_in_npm.unlink()
    with pytest.raises(VeilfedError) as caught:
        fetch([ICONS], tmp_path / "packages")
    assert caught.value.code is Code.DOWNLOAD_FAILED
    assert "@scope/icons@1.2.3" in caught.value.message


@pytest.mark.usefixtures("stand_in_npm")
def test_reading_notices_a_changed_file(tmp_path: Path) -> None:
    with pytest.raises(VeilfedError) as caught:
        read(ICONS, tmp_path)
    assert caught.value.code is Code.DATA_MISSING
    fetch([ICONS], tmp_path)[ICONS].write_bytes(b"changed")
    with pytest.raises(VeilfedError) as caught:
        read(ICONS, tmp_path)
    assert caught.value.code is Code.STATE_CORRUPT
