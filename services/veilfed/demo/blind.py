"""The double-blind demonstration: three institutions, a vendor's student, and all that leaves encrypted or masked.

The vendor distils a student on texts of another domain, and computes its blocks on what the institutions have
encrypted; they train adapters on the outputs that are released, and add them up under masks.
"""

import asyncio
import csv
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veilfed.demo.federation import READY_SECONDS, Federation
from veilfed.demo.processes import command
from veilfed.demo.tasks import Task
from veilfed.demo.workspace import FEDERATION, LOOPBACK, Institution, Workspace, tls_paths, write_yaml
from veilfed.errors import Code, VeilfedError
from veilfed.identity import enrollment
from veilfed.identity.authority import CertificateAuthority
from veilfed.identity.material import TlsFiles
from veilfed.identity.names import Identity, Role
from veilfed.jobs import JobSpec

__all__ = ["BLIND", "BlindWorkspace", "check", "distil", "job", "running_blind"]

BLIND = Task(
    name="blind",
    title="sentiment of tweets, product and film reviews, on ciphertexts to the model's owner (VADER, 250 each)",
    model="minilm",
    domains={name: {"source": "vader", "domain": name, "limit": 250} for name in ("tweets", "amazon", "movies")},
    classes=("negative", "positive"),
    rounds=30,
    blocks=2,
    classifier_rate=0.0,
    transform_rate=0.0,
)
# The vendor's own texts, of another domain than the institutions'.
AUXILIARY = "nyt"
AUXILIARY_TEXTS, EPOCHS, TOKENS = 1200, 4, 32


@dataclass(frozen=True)
class BlindWorkspace(Workspace):
    """With a vendor, whose oracle is of no institution's zone."""

    @property
    def vendor_folder(self) -> Path:
        return self.folder / "vendor"

    @property
    def vendor(self) -> Identity:
        return Identity(FEDERATION, Role.ORACLE, "vendor", "oracle")

    @property
    def student(self) -> Path:
        return self.vendor_folder / "student.safetensors"

    @property
    def inputs(self) -> Path:
        return self.vendor_folder / "inputs.safetensors"

    @property
    def spec(self) -> Path:
        return self.folder / "job.json"

    def agent_config(self, institution: Institution) -> Path:
        return institution.agent_folder / "agent.yaml"

    def write_vendor(self) -> Path:
        folder = self.vendor_folder
        document = {
            "identity": tls_paths(TlsFiles.in_folder(folder / "identity")),
            "listen": LOOPBACK,
            "state": str(folder / "state"),
            "quota": 100_000,
            "encrypted": {"student": str(self.student), "inputs": str(self.inputs)},
        }
        return write_yaml(folder / "oracle.yaml", document)

    def write_blind_agent(self, institution: Institution, packages: Path, aggregator: str, vendor: str) -> Path:
        folder = institution.agent_folder
        document = {
            "identity": tls_paths(TlsFiles.in_folder(folder / "identity")),
            "aggregator": {"address": aggregator, "identity": str(self.aggregator)},
            "encrypted": {
                "address": vendor,
                "identity": str(self.vendor),
                "inputs": str(self.inputs),
                "threads": 2,  # the vendor waits meanwhile
            },
            "data": self.task.domains[institution.name],
            "state": str(folder / "state"),
            "packages": str(packages),
            "policy": {"consent": "allow", "strategies": ["blindfed"]},
            "secure_aggregation": {"roster": list(self.task.domains)},
        }
        return write_yaml(self.agent_config(institution), document)


def _called(*arguments: str | Path) -> Any:
    """The JSON document of a `veilfed` subcommand. Raises VeilfedError(JOB_FAILED)."""
    done = subprocess.run(command(*arguments, "--json"), stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        what = " ".join(str(argument) for argument in arguments[:2])
        raise VeilfedError(Code.JOB_FAILED, f"`veilfed {what}` failed; its error is above")
    return json.loads(done.stdout)


def distil(workspace: BlindWorkspace, packages: Path) -> dict[str, Any]:
    """The vendor's student, and the file of its inputs; what was measured of it. Minutes."""
    folder = workspace.vendor_folder
    folder.mkdir(parents=True, exist_ok=True)
    texts, chosen = folder / "all.csv", folder / "auxiliary.csv"
    subprocess.run(
        command("data", "export", "vader", texts, "--folder", packages), stdout=subprocess.DEVNULL, check=True
    )
    with texts.open(newline="", encoding="utf-8") as source, chosen.open("w", newline="", encoding="utf-8") as target:
        writer = csv.writer(target)
        writer.writerow(("text", "label"))
        rows = [row for row in csv.DictReader(source) if row["domain"] == AUXILIARY]
        for row in rows[:: max(1, len(rows) // AUXILIARY_TEXTS)]:
            writer.writerow((row["text"], row["label"]))
    options = {"--fm": BLIND.model, "--blocks": BLIND.blocks, "--epochs": EPOCHS, "--tokens": TOKENS}
    arguments = [str(part) for option in options.items() for part in option]
    made = _called("oracle", "distill", *arguments, "--data", chosen, "--out", workspace.student, "--folder", packages)
    subprocess.run(
        command(
            "oracle", "publish-inputs", "--student", workspace.student, "--out", workspace.inputs, "--folder", packages
        ),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return dict(made)


@contextmanager
def running_blind(workspace: BlindWorkspace, packages: Path, on_step: Callable[[str], None]) -> Iterator[Federation]:
    """Aggregator, vendor and agents; all have ended when the block ends."""
    federation = Federation(workspace, packages, on_step)
    with ExitStack() as stack:
        stack.callback(federation.stop)
        authority = CertificateAuthority.create(workspace.ca, FEDERATION)
        federation.start("pki", "pki", "serve", "--dir", workspace.ca, "--listen", LOOPBACK)
        address = federation.address("pki")
        wanted = [
            (workspace.aggregator, workspace.aggregator_folder),
            (workspace.admin, workspace.admin_folder),
            (workspace.vendor, workspace.vendor_folder),
            *((institution.agent, institution.agent_folder) for institution in workspace.institutions),
        ]
        for identity, folder in wanted:
            on_step(f"certificate of {identity}")
            asyncio.run(enrollment.enroll(authority.new_token(identity, address), folder / "identity"))
        federation.stop("pki")
        federation.start("aggregator", "aggregator", "serve", "--config", workspace.write_aggregator())
        federation.start("vendor", "oracle", "serve", "--config", workspace.write_vendor())
        aggregator, vendor = federation.address("aggregator"), federation.address("vendor")
        for institution in workspace.institutions:
            config = workspace.write_blind_agent(institution, packages, aggregator, vendor)
            federation.start(f"agent-{institution.name}", "agent", "serve", "--config", config).ready(READY_SECONDS)
        yield federation


def job(workspace: BlindWorkspace, rounds: int, seed: int) -> JobSpec:
    """The job on what the vendor's student releases; it is kept for `check`."""
    config = workspace.vendor_folder / "oracle.yaml"
    student = _called("oracle", "student", "--config", config, "--federation", FEDERATION)
    spec = JobSpec.model_validate(
        {
            "name": f"blind-{seed}",
            "strategy": {
                "name": "blindfed",
                "classes": list(workspace.task.classes),
                "rank": 16,
                "alpha": 0.3,
                # At 0.1 training is so unsteady that the noise of encryption changes which texts are right.
                "rate": 0.03,
                "epochs": 5,
                "batch_size": 32,
                **student,
            },
            "cohort": {"train": list(workspace.task.domains)},
            "rounds": rounds,
            "quorum": len(workspace.task.domains),
            "deadline_seconds": 7200,  # the first round waits for the passes
            "seed": seed,
            "secure_aggregation": {},
        }
    )
    workspace.spec.write_text(spec.model_dump_json(), encoding="utf-8")
    return spec


def check(workspace: BlindWorkspace) -> dict[str, Any]:
    """The same job in the clear, beside it."""
    agents = [
        part
        for institution in workspace.institutions
        for part in ("--agent", f"{institution.name}={workspace.agent_config(institution)}")
    ]
    return dict(_called("study", "blind-check", "--student", workspace.student, "--job", workspace.spec, *agents))
