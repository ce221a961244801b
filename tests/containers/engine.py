"""A container engine: one that can be reached, or one of our own for as long as the tests run.

python -m tests.containers.engine       whether there is one, or one can be started; says why not
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import until

__all__ = ["ROOT", "Engine", "connected"]

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "deploy" / "wheels"
# Wheels of the host's Python are installed, so the image has the same.
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
DEBIAN = {"3.11": "bookworm", "3.13": "trixie"}
PULL_SECONDS = 300
BUILD_SECONDS = 1200
CALL_SECONDS = 60


@dataclass(frozen=True)
class Engine:
    """A command-line client and the engine that it talks to (`host` empty: the client's own choice)."""

    client: str
    host: str = ""

    def run(self, *arguments: str | Path, timeout: float = CALL_SECONDS, check: bool = True) -> str:
        """The output of a client's command, standard error included. Fails with it unless the command succeeds."""
        environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
        if self.host:
            environment["DOCKER_HOST"] = self.host
        command = [self.client, *(str(argument) for argument in arguments)]
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
            text=True,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def works(self, *arguments: str, timeout: float = CALL_SECONDS) -> bool:
        try:
            self.run(*arguments, timeout=timeout)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            return False
        return True

    def base(self) -> str:
        """The image to build on: the usual one, or where none can be pulled one of Debian's packages."""
        usual = f"python:{PYTHON}-slim"
        if self.works("image", "inspect", usual) or self.works("pull", "--quiet", usual, timeout=PULL_SECONDS):
            return usual
        made = f"veilfed-base:{PYTHON}"
        if not self.works("image", "inspect", made):
            self.run("import", _base_tar(), made, timeout=BUILD_SECONDS)
        return made

    def build(self, service: str, base: str) -> str:
        """Builds the image of a service without a network, from deploy/wheels; returns its name."""
        name = f"veilfed-{service}:test"
        options = ["--quiet", "--network=none", f"--build-arg=BASE={base}", "--build-arg=PIP_NO_INDEX=1"]
        file = ROOT / "deploy" / "images" / f"{service}.Dockerfile"
        self.run("build", *options, f"--file={file}", f"--tag={name}", ROOT, timeout=BUILD_SECONDS)
        return name


def _install(*packages: str) -> None:
    """Debian's packages, where we may install them."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise AssertionError(f"no container engine can be reached; start one, or install {', '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *command], env=environment, stdin=subprocess.DEVNULL, check=True)


def _base_tar() -> Path:
    """Debian with Python, made once and kept in the user's cache."""
    tar = Path.home() / ".cache" / "veilfed" / f"base-{PYTHON}.tar"
    if tar.is_file():
        return tar
    if shutil.which("mmdebstrap") is None:
        _install("mmdebstrap")
    tar.parent.mkdir(parents=True, exist_ok=True)
    made = tar.with_suffix(".part.tar")
    include = "--include=python3-minimal,python3-venv,ca-certificates"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", include, DEBIAN[PYTHON], str(made)]
    subprocess.run(command, stdin=subprocess.DEVNULL, timeout=BUILD_SECONDS, check=True)
    return made.replace(tar)


def _client() -> str | None:
    """A client that can build: since version 23 that takes its plug-in buildx, before it was part of it."""
    for path in (shutil.which("docker"), "/usr/bin/docker"):
        if path is None or not Path(path).is_file():
            continue
        version = re.search(r"version (\d+)\.", Engine(path).run("--version", check=False))
        if Engine(path).works("buildx", "version") or (version is not None and int(version[1]) < 23):
            return path
    return None


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(60)


@contextmanager
def _own(folder: Path, client: str) -> Iterator[Engine]:
    """An engine with everything of its own in `folder`, stopped at the end. It leaves the default bridge alone."""
    engine = Engine(client, f"unix://{folder}/engine.sock")
    command = ["dockerd", f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    command += [f"--host={engine.host}", "--bridge=none", "--exec-opt=native.cgroupdriver=cgroupfs"]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: engine.works("version") or daemon.poll() is not None, 60, "the engine answers", interval=0.5)
        if daemon.poll() is not None:
            raise AssertionError(f"the engine has ended:\n{(folder / 'log').read_text()[-2000:]}")
        yield engine
    finally:
        _stop(daemon)


def _remove(folder: Path) -> None:
    """The engine's last mounts may go a moment after it."""
    end = time.monotonic() + 30
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.5)


@contextmanager
def connected() -> Iterator[Engine]:
    """The engine that the client reaches by itself (DOCKER_HOST, or the usual socket), else one of our own."""
    client = _client()
    if client is not None and Engine(client).works("version"):
        yield Engine(client)
        return
    if client is None or shutil.which("dockerd") is None:
        _install("docker.io", "iptables")
        client = _client()
    assert client is not None, "the docker client that is installed cannot build images: it lacks buildx"
    folder = Path(tempfile.mkdtemp(prefix="veilfed-engine-"))
    try:
        with _own(folder, client) as engine:
            yield engine
    finally:
        _remove(folder)


def main() -> int:
    try:
        with connected() as engine:
            sys.stdout.write(f"container engine: {engine.run('version', '--format={{.Server.Version}}')}")
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        sys.stdout.write(f"no container engine: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
