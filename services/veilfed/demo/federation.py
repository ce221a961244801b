"""Brings a whole federation up: identities by enrolment, then every party as a process of its own."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from veilfed.demo.processes import Process, command
from veilfed.demo.workspace import FEDERATION, LOOPBACK, Institution, Workspace
from veilfed.errors import Code, VeilfedError
from veilfed.identity import enrollment
from veilfed.identity.authority import CertificateAuthority, make_identity_files
from veilfed.identity.names import Identity

__all__ = ["Federation", "running"]

READY_SECONDS = 180.0
STOP_SECONDS = 20.0


class Federation:
    """The running parties of a workspace."""

    def __init__(
        self, workspace: Workspace, packages: Path, on_step: Callable[[str], None] = lambda step: None
    ) -> None:
        self.workspace = workspace
        self.addresses: dict[str, str] = {}  # of the services that run, by name
        self._packages = packages
        self._on_step = on_step
        self._processes: dict[str, Process] = {}

    def start(self, name: str, *arguments: str | Path) -> Process:
        """Starts a `veilfed` subcommand; its log is logs/NAME.err."""
        self._on_step(f"starting {name}")
        process = Process(command(*arguments), self.workspace.log(name))
        self._processes[name] = process
        return process

    def address(self, name: str) -> str:
        """Waits until a service is ready; returns where it listens."""
        self.addresses[name] = f"127.0.0.1:{self._processes[name].ready(READY_SECONDS)['port']}"
        return self.addresses[name]

    def check(self) -> None:
        """Raises VeilfedError(UNREACHABLE) when a party has ended."""
        for name, process in self._processes.items():
            if not process.running():
                raise VeilfedError(Code.UNREACHABLE, f"{name} has ended:\n{process.tail()}", f"Its log: {process.err}")

    def processes(self) -> dict[str, int]:
        """Names and process ids."""
        return {name: process.pid for name, process in self._processes.items()}

    def stop(self, only: str | None = None) -> None:
        """Asks the parties to end, together; whoever does not end in time is killed."""
        chosen = [self._processes.pop(name) for name in list(self._processes) if only in (None, name)]
        for process in chosen:
            process.ask_to_stop()
        end = time.monotonic() + STOP_SECONDS
        for process in chosen:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except VeilfedError:
                process.kill()

    def enroll(self) -> None:
        """Everybody's identity: certificates for one-time tokens, and each oracle's from its institution's own root."""
        workspace = self.workspace
        authority = CertificateAuthority.create(workspace.ca, FEDERATION)
        self.start("pki", "pki", "serve", "--dir", workspace.ca, "--listen", LOOPBACK)
        address = self.address("pki")

        def get(identity: Identity, folder: Path) -> None:
            self._on_step(f"certificate of {identity}")
            token = authority.new_token(identity, address)
            asyncio.run(enrollment.enroll(token, folder))

        get(workspace.aggregator, workspace.aggregator_folder / "identity")
        get(workspace.admin, workspace.admin_folder / "identity")
        for institution in workspace.institutions:
            get(institution.agent, institution.agent_folder / "identity")
            zone = CertificateAuthority.create(institution.zone, FEDERATION, institution.name)
            make_identity_files(
                zone, institution.oracle, institution.oracle_folder / "identity", bundle=authority.root_pem
            )
        self.stop("pki")

    def serve(self) -> None:
        """Starts the aggregator, each institution's sealed oracle, then each agent; waits until all are ready."""
        workspace = self.workspace
        self.start("aggregator", "aggregator", "serve", "--config", workspace.write_aggregator())
        for institution in workspace.institutions:
            self.start_oracle(institution)
        self.address("aggregator")
        agents = [self.start_agent(institution) for institution in workspace.institutions]
        for institution, agent in zip(workspace.institutions, agents, strict=True):
            agent.ready(READY_SECONDS)
            self._on_step(f"agent-{institution.name} has joined")

    def start_oracle(self, institution: Institution) -> Process:
        config = self.workspace.write_oracle(institution, self._packages)
        return self.start(f"oracle-{institution.name}", "oracle", "serve", "--config", config)

    def start_agent(self, institution: Institution) -> Process:
        """The agent, once its aggregator and its oracle listen."""
        oracle = self.address(f"oracle-{institution.name}")
        config = self.workspace.write_agent(institution, self._packages, self.addresses["aggregator"], oracle)
        return self.start(f"agent-{institution.name}", "agent", "serve", "--config", config)


@contextmanager
def running(workspace: Workspace, packages: Path, on_step: Callable[[str], None]) -> Iterator[Federation]:
    """A federation that is ready; all of its processes have ended when the block ends. `on_step` hears of each step."""
    federation = Federation(workspace, packages, on_step)
    with ExitStack() as stack:
        stack.callback(federation.stop)
        federation.enroll()
        federation.serve()
        yield federation
