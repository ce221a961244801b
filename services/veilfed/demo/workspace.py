"""The files of a whole federation in one folder: identities, configurations, states, logs.

federation/ca            the federation's certificate authority
aggregator/              the coordinator
admin/                   the administrator who submits the jobs
institutions/NAME/zone   the institution's own root, from which its oracle has its certificate
institutions/NAME/oracle the model owner's sealed service, in the institution's zone
institutions/NAME/agent  the institution's own service
logs/
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from veilfed.demo.tasks import Task
from veilfed.identity.material import TlsFiles
from veilfed.identity.names import Identity, Role

__all__ = ["FEDERATION", "Institution", "Workspace", "tls_paths", "write_yaml"]

FEDERATION = "demo.veilfed"
LOOPBACK = "127.0.0.1:0"


def write_yaml(path: Path, document: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def tls_paths(files: TlsFiles) -> dict[str, str]:
    return {name: str(path) for name, path in files.model_dump().items()}


@dataclass(frozen=True)
class Institution:
    """One data owner with its agent and its sealed oracle."""

    name: str
    folder: Path

    @property
    def zone(self) -> Path:
        return self.folder / "zone"

    @property
    def oracle_folder(self) -> Path:
        return self.folder / "oracle"

    @property
    def agent_folder(self) -> Path:
        return self.folder / "agent"

    @property
    def ledger(self) -> Path:
        return self.agent_folder / "state" / "ledger.jsonl"

    @property
    def oracle(self) -> Identity:
        return Identity(FEDERATION, Role.ORACLE, self.name, "oracle")

    @property
    def agent(self) -> Identity:
        return Identity(FEDERATION, Role.AGENT, self.name, "agent")


@dataclass(frozen=True)
class Workspace:
    """Where everything of a demonstration lies."""

    folder: Path
    task: Task

    @property
    def ca(self) -> Path:
        return self.folder / "federation" / "ca"

    @property
    def aggregator_folder(self) -> Path:
        return self.folder / "aggregator"

    @property
    def admin_folder(self) -> Path:
        return self.folder / "admin"

    @property
    def aggregator(self) -> Identity:
        return Identity(FEDERATION, Role.AGGREGATOR, "coordinator", "aggregator")

    @property
    def admin(self) -> Identity:
        return Identity(FEDERATION, Role.ADMIN, "coordinator", "admin")

    @property
    def institutions(self) -> list[Institution]:
        return [Institution(name, self.folder / "institutions" / name) for name in self.task.domains]

    def log(self, name: str) -> Path:
        return self.folder / "logs" / name

    def write_aggregator(self) -> Path:
        """The aggregator's configuration; returns its path."""
        folder = self.aggregator_folder
        return write_yaml(
            folder / "aggregator.yaml",
            {
                "identity": tls_paths(TlsFiles.in_folder(folder / "identity")),
                "listen": LOOPBACK,
                "database": f"sqlite:///{folder / 'aggregator.sqlite'}",
                "artifacts": str(folder / "artifacts"),
            },
        )

    def write_oracle(self, institution: Institution, packages: Path) -> Path:
        """The configuration of an institution's sealed oracle.

        It shows a certificate of its own zone and admits clients that the federation's root has signed.
        """
        folder = institution.oracle_folder
        identity = tls_paths(TlsFiles.in_folder(folder / "identity"))
        return write_yaml(
            folder / "oracle.yaml",
            {
                "identity": identity,
                "listen": LOOPBACK,
                "model": self.task.model,
                "folder": str(packages),
                "state": str(folder / "state"),
                "quota": 100_000,
            },
        )

    def write_agent(self, institution: Institution, packages: Path, aggregator: str, oracle: str) -> Path:
        """An agent's configuration, once the addresses of its two services are known."""
        folder = institution.agent_folder
        return write_yaml(
            folder / "agent.yaml",
            {
                "identity": tls_paths(TlsFiles.in_folder(folder / "identity")),
                "aggregator": {"address": aggregator, "identity": str(self.aggregator)},
                "oracle": {
                    "address": oracle,
                    "identity": str(institution.oracle),
                    "root": str(institution.zone / "root.pem"),
                },
                "data": self.task.domains[institution.name],
                "state": str(folder / "state"),
                "packages": str(packages),
                "policy": {"consent": "allow", "strategies": ["fedot"]},
            },
        )
