"""A federation of containers on a private network: what each has mounted, and how it is started."""

import csv
import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.containers.engine import Engine
from tests.support.processes import until, veilfed
from veilfed.packages import default_folder

__all__ = ["FEDERATION", "USER", "Containers", "make_identities", "run_veilfed", "write_texts"]

FEDERATION = "smoke.veilfed"
# As root we give files to the images' own user; others run the containers as themselves, so that both may read them.
USER = 10001 if os.geteuid() == 0 else os.geteuid()
READY_SECONDS = 120
WORDS = {
    "positive": ("wonderful", "lovely", "excellent", "great", "delightful"),
    "negative": ("terrible", "awful", "horrible", "dreadful", "disgusting"),
}


def run_veilfed(*arguments: str | Path) -> Any:
    """The JSON document of a `veilfed` command on this machine. Fails unless the command succeeds."""
    done = subprocess.run(veilfed(*arguments, "--json"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def make_identities(folder: Path, institutions: tuple[str, ...]) -> None:
    """Certificates by `veilfed pki`, each in etc/PARTY/identity; the oracles' are from their institutions' roots."""
    root = folder / "ca"
    run_veilfed("pki", "init", "--dir", root, "--federation", FEDERATION)

    def issue(authority: Path, path: str, party: str) -> None:
        out = folder / "etc" / party / "identity"
        who = f"spiffe://{FEDERATION}/{path}"
        run_veilfed("pki", "issue", "--dir", authority, "--out", out, "--id", who, "--bundle", root / "root.pem")

    issue(root, "aggregator/coordinator/main", "aggregator")
    issue(root, "admin/coordinator/alice", "admin")
    for name in institutions:
        zone = folder / f"zone-{name}"
        run_veilfed("pki", "init", "--dir", zone, "--federation", FEDERATION, "--zone", name)
        issue(zone, f"oracle/{name}/oracle", f"oracle-{name}")
        issue(root, f"agent/{name}/agent", f"agent-{name}")
        (folder / "etc" / f"agent-{name}" / "zone.pem").write_bytes((zone / "root.pem").read_bytes())


def write_texts(path: Path, topic: str) -> None:
    """20 texts of each of the two classes, all different."""
    rows = [
        (f"The {thing} of the {topic} was {word}.", label)
        for label, words in WORDS.items()
        for word in words
        for thing in ("food", "staff", "place", "music")
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


class Containers:
    """The containers of a test; `folder` has etc/PARTY and state/PARTY, which are mounted into them."""

    def __init__(self, engine: Engine, folder: Path, images: dict[str, str]) -> None:
        self.engine = engine
        self.folder = folder
        self.images = images
        self.network = f"veilfed-{os.getpid()}"
        self.names: list[str] = []
        engine.run("network", "create", "--internal", self.network)

    def configure(self, party: str, file: str, document: dict[str, Any]) -> None:
        """Writes a party's YAML file and gives its folders to its user alone."""
        place, state = self.folder / "etc" / party, self.folder / "state" / party
        state.mkdir(parents=True)
        (place / file).write_text(yaml.safe_dump(document), encoding="utf-8")
        for path in (place, state, *place.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
            os.chown(path, USER, USER if os.geteuid() == 0 else -1)

    def _options(self, party: str) -> list[str]:
        """Nothing more than a party needs: no root, no capability, no way to write but to its state."""
        return [
            f"--network={self.network}",
            f"--user={USER}:{USER if os.geteuid() == 0 else os.getegid()}",
            "--read-only",
            "--tmpfs=/tmp",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            f"--volume={self.folder / 'etc' / party}:/etc/veilfed:ro",
            f"--volume={self.folder / 'state' / party}:/var/lib/veilfed",
        ]

    def start(self, service: str, party: str) -> None:
        """Starts a service under the network's name `party`, with the command of its image."""
        options = self._options(party)
        if service == "oracle":
            options.append(f"--volume={default_folder()}:/srv/packages:ro")
        name = f"{self.network}-{party}"
        self.names.append(name)
        self.engine.run("run", "--detach", f"--name={name}", f"--network-alias={party}", *options, self.images[service])

    def wait_ready(self) -> None:
        """Until every service has printed its ready line."""
        for name in self.names:
            until(partial(self._ready, name), READY_SECONDS, f"{name} is ready", interval=0.5)

    def _ready(self, name: str) -> bool:
        log = self.engine.run("logs", name)
        assert self.inspect(name, "{{.State.Running}}") == "true", log
        return '"ready": true' in log

    def healthy(self, name: str) -> bool:
        """Whether the image's own check says so."""
        return self.inspect(name, "{{.State.Health.Status}}") == "healthy"

    def inspect(self, name: str, template: str) -> str:
        return self.engine.run("inspect", "--format", template, name).strip()

    def admin(self, *arguments: str, timeout: float = 60) -> str:
        """The output of `veilfed ARGUMENTS` in a container of the administrator's."""
        options = self._options("admin")
        return self.engine.run("run", "--rm", *options, self.images["aggregator"], *arguments, timeout=timeout)

    def remove(self) -> None:
        for name in self.names:
            self.engine.run("rm", "--force", name, check=False)
        self.engine.run("network", "rm", self.network)
