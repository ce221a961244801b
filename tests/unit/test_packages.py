"""Members of packages: pip itself fetches from a folder that stands in for the registry."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from veilfed.errors import Code, VeilfedError
from veilfed.packages import PackageFile, default_folder, digest, fetch, locate

WEIGHTS = b"weights of a small model"
SCRIPT_RAN = "the build script ran"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tar(members: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def write_wheel(folder: Path, members: Mapping[str, bytes]) -> PackageFile:
    """A wheel of the package `tiny` with these members; describes its file tiny/weights.bin."""
    about = "tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return PackageFile("pypi", "tiny", "1.0", "tiny/weights.bin", sha256(WEIGHTS))


def write_sdist(folder: Path, ran: Path) -> PackageFile:
    """A source distribution whose build script leaves the file `ran`; describes a file of an archive inside it."""
    script = f"""
import pathlib
def prepare_metadata_for_build_wheel(folder, settings=None):
    pathlib.Path({str(ran)!r}).write_text({SCRIPT_RAN!r})
    target = pathlib.Path(folder, "small-2.0.dist-info")
    target.mkdir()
    target.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: small\\nVersion: 2.0\\n")
    return target.name
"""
    project = '[build-system]\nrequires = []\nbuild-backend = "script"\nbackend-path = ["."]\n'
    archive = tar(
        {
            "small-2.0/PKG-INFO": b"Metadata-Version: 2.1\nName: small\nVersion: 2.0\n",
            "small-2.0/pyproject.toml": project.encode(),
            "small-2.0/script.py": script.encode(),
            "small-2.0/more/data.tar.gz": tar({"data/rows.txt": WEIGHTS}),
        }
    )
    (folder / "small-2.0.tar.gz").write_bytes(archive)
    member = "small-2.0/more/data.tar.gz!data/rows.txt"
    return PackageFile("pypi", "small", "2.0", member, sha256(WEIGHTS), sha256(archive))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def refusal(file: PackageFile, folder: Path) -> VeilfedError:
    with pytest.raises(VeilfedError) as refused:
        fetch([file], folder)
    return refused.value


def test_keeps_the_wanted_member_of_a_wheel_and_nothing_else(registry: Path, tmp_path: Path) -> None:
    file = write_wheel(registry, {"tiny/weights.bin": WEIGHTS, "tiny/__init__.py": b"", "tiny/other.bin": b"x"})
    folder = tmp_path / "packages"
    found = fetch([file], folder)
    assert found[file].read_bytes() == WEIGHTS
    assert [path for path in folder.rglob("*") if path.is_file()] == [found[file]]
    assert locate(file, folder) == found[file]
    assert digest(found[file]) == file.sha256


def test_what_is_here_and_right_is_not_downloaded_again(registry: Path, tmp_path: Path) -> None:
    file = write_wheel(registry, {"tiny/weights.bin": WEIGHTS})
    fetch([file], tmp_path)
    next(registry.iterdir()).unlink()
    seen: list[tuple[str, int, int]] = []
    assert fetch([file], tmp_path, lambda *step: seen.append(step))[file].read_bytes() == WEIGHTS
    assert seen == [("", 0, 0)]


def test_a_damaged_file_is_replaced(registry: Path, tmp_path: Path) -> None:
    file = write_wheel(registry, {"tiny/weights.bin": WEIGHTS})
    fetch([file], tmp_path)[file].write_bytes(b"damaged")
    seen: list[tuple[str, int, int]] = []
    assert fetch([file], tmp_path, lambda *step: seen.append(step))[file].read_bytes() == WEIGHTS
    assert seen == [("tiny==1.0", 0, 1), ("", 1, 1)]


def test_another_files_bytes_are_not_kept(registry: Path, tmp_path: Path) -> None:
    file = write_wheel(registry, {"tiny/weights.bin": b"not the published ones"})
    error = refusal(file, tmp_path / "packages")
    assert error.code is Code.DOWNLOAD_FAILED
    assert "tiny/weights.bin of tiny==1.0" in error.message
    assert not (tmp_path / "packages").exists()


def test_a_release_without_the_member_is_refused_by_name(registry: Path, tmp_path: Path) -> None:
    file = replace(write_wheel(registry, {"tiny/weights.bin": WEIGHTS}), member="tiny/absent.bin")
    error = refusal(file, tmp_path)
    assert error.code is Code.DOWNLOAD_FAILED
    assert "tiny/absent.bin" in error.message


def test_a_release_that_the_registry_does_not_have_is_refused_with_the_command_to_try(
    registry: Path, tmp_path: Path
) -> None:
    file = replace(write_wheel(registry, {"tiny/weights.bin": WEIGHTS}), version="9.9")
    error = refusal(file, tmp_path)
    assert error.code is Code.DOWNLOAD_FAILED
    assert "pip download --no-deps tiny==9.9" in error.hint
    assert str(registry) not in f"{error.message} {error.hint}"


def test_reads_an_archive_inside_a_source_distribution(registry: Path, tmp_path: Path) -> None:
    file = write_sdist(registry, tmp_path / "ran")
    assert fetch([file], tmp_path / "packages")[file].read_bytes() == WEIGHTS
    assert (tmp_path / "ran").read_text() == SCRIPT_RAN  # so that the next test shows something


def test_the_script_of_an_unknown_source_distribution_never_runs(registry: Path, tmp_path: Path) -> None:
    file = replace(write_sdist(registry, tmp_path / "ran"), archive_sha256="0" * 64)
    assert refusal(file, tmp_path / "packages").code is Code.DOWNLOAD_FAILED
    assert not (tmp_path / "ran").exists()


def test_a_wheel_is_never_built_from_source(registry: Path, tmp_path: Path) -> None:
    file = replace(write_sdist(registry, tmp_path / "ran"), archive_sha256=None)
    assert refusal(file, tmp_path / "packages").code is Code.DOWNLOAD_FAILED
    assert not (tmp_path / "ran").exists()


def test_links_in_an_archive_are_not_followed(registry: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(WEIGHTS)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        link = tarfile.TarInfo("link.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        archive.addfile(link)
    file = write_wheel(registry, {"tiny/inner.tar.gz": out.getvalue()})
    error = refusal(replace(file, member="tiny/inner.tar.gz!link.bin"), tmp_path / "packages")
    assert error.code is Code.DOWNLOAD_FAILED


@pytest.mark.parametrize("member", ["../outside", "/etc/outside", "a.zip!../../outside"])
def test_no_member_is_placed_outside_the_folder(tmp_path: Path, member: str) -> None:
    error = refusal(PackageFile("pypi", "tiny", "1.0", member, "0" * 64), tmp_path)
    assert error.code is Code.INPUT_INVALID


def test_without_npm_the_error_names_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refusal(PackageFile("npm", "@scope/icons", "1.0.0", "package/icons.json", "0" * 64), tmp_path)
    assert error.code is Code.DOWNLOAD_FAILED
    assert "npm is not installed" in error.message


def test_locate_says_what_has_not_been_fetched(tmp_path: Path) -> None:
    with pytest.raises(VeilfedError, match=r"rows\.csv of tiny") as missing:
        locate(PackageFile("pypi", "tiny", "1.0", "tiny/rows.csv", "0" * 64), tmp_path)
    assert missing.value.code is Code.DATA_MISSING


def test_a_folder_that_cannot_be_made_is_named(registry: Path, tmp_path: Path) -> None:
    (tmp_path / "packages").write_bytes(b"a file where the folder should be")
    error = refusal(write_wheel(registry, {"tiny/weights.bin": WEIGHTS}), tmp_path / "packages")
    assert error.code is Code.FILE_UNUSABLE


def test_the_folder_may_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VEILFED_PACKAGES", str(tmp_path))
    assert default_folder() == tmp_path
