"""The images at work: two institutions, each with its agent and its own sealed oracle, train together."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.containers import engine as engines
from tests.containers.engine import Engine
from tests.containers.federation import (
    FEDERATION,
    USER,
    Containers,
    make_identities,
    run_veilfed,
    write_texts,
)
from tests.support.processes import until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

INSTITUTIONS = ("north", "south")
IDENTITY = {name: f"/etc/veilfed/identity/{name}.pem" for name in ("certificate", "key", "bundle")}
AGGREGATOR = f"spiffe://{FEDERATION}/aggregator/coordinator/main"
JOB = {
    "name": "smoke",
    "strategy": {"name": "fedot", "classes": ["negative", "positive"], "dimension": 384, "blocks": 24},
    "cohort": {"train": list(INSTITUTIONS)},
    "rounds": 2,
    "quorum": 2,
    "deadline_seconds": 120,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engines.connected() as found:
        yield found


@pytest.fixture(scope="module")
def images(engine: Engine) -> dict[str, str]:
    base = engine.base()
    return {service: engine.build(service, base) for service in ("aggregator", "oracle", "agent")}


def agent_config(name: str) -> dict[str, Any]:
    return {
        "identity": IDENTITY,
        "aggregator": {"address": "aggregator:7443", "identity": AGGREGATOR},
        "oracle": {
            "address": f"oracle-{name}:7441",
            "identity": f"spiffe://{FEDERATION}/oracle/{name}/oracle",
            "root": "/etc/veilfed/zone.pem",
        },
        "data": {"source": "table", "path": "/etc/veilfed/texts.csv"},
        "test_fraction": 0.5,  # counts over fewer than 20 samples are not given out
        "state": "/var/lib/veilfed",
        "policy": {"consent": "allow"},
    }


def configure(containers: Containers) -> None:
    make_identities(containers.folder, INSTITUTIONS)
    containers.configure(
        "aggregator",
        "aggregator.yaml",
        {
            "identity": IDENTITY,
            "listen": "0.0.0.0:7443",
            "database": "sqlite:////var/lib/veilfed/aggregator.sqlite",
            "artifacts": "/var/lib/veilfed/artifacts",
        },
    )
    containers.configure("admin", "job.yaml", JOB)
    for name in INSTITUTIONS:
        oracle = {"identity": IDENTITY, "listen": "0.0.0.0:7441", "model": "minilm", "state": "/var/lib/veilfed"}
        containers.configure(f"oracle-{name}", "oracle.yaml", oracle)
        write_texts(containers.folder / "etc" / f"agent-{name}" / "texts.csv", f"{name}ern hotel")
        containers.configure(f"agent-{name}", "agent.yaml", agent_config(name))


@pytest.fixture
def containers(engine: Engine, images: dict[str, str], tmp_path: Path) -> Iterator[Containers]:
    """All services, ready."""
    made = Containers(engine, tmp_path, images)
    try:
        configure(made)
        made.start("aggregator", "aggregator")
        for name in INSTITUTIONS:
            made.start("oracle", f"oracle-{name}")
        for name in INSTITUTIONS:
            made.start("agent", f"agent-{name}")
        made.wait_ready()
        yield made
    finally:
        made.remove()


def job(containers: Containers, *arguments: str, timeout: float = 60) -> str:
    connection = ["--identity", "/etc/veilfed/identity", "--aggregator", "aggregator:7443"]
    return containers.admin("job", *arguments, *connection, "--aggregator-id", AGGREGATOR, timeout=timeout)


def check_confined(containers: Containers, name: str) -> None:
    """What the kernel says about the service's process."""
    status = dict(
        line.split(":\t", 1)
        for line in containers.engine.run("exec", name, "cat", "/proc/1/status").splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split() == [str(USER)] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert "Read-only file system" in containers.engine.run("exec", name, "touch", "/opt/veilfed/x", check=False)
    assert containers.inspect(name, "{{.NetworkSettings.Ports}}").count("HostPort") == 0


def test_two_rounds_in_containers(containers: Containers) -> None:
    """The job is done, the ledgers verify, nobody has more rights than needed, and everybody ends when asked to."""
    for name in containers.names:
        check_confined(containers, name)
        if "-agent-" not in name:
            until(partial(containers.healthy, name), 60, f"{name} is healthy", interval=0.5)

    job_id = json.loads(job(containers, "submit", "/etc/veilfed/job.yaml", "--json"))["job_id"]
    job(containers, "watch", job_id, timeout=240)
    found = json.loads(job(containers, "show", job_id, "--json"))
    assert (found["summary"]["state"], found["summary"]["rounds_published"]) == ("done", 2)
    counts = {client["institution"]: client["evaluations"] for client in found["rounds"][-1]["clients"]}
    assert set(counts) == set(INSTITUTIONS)
    assert all(evaluation["total"] == 20 for evaluations in counts.values() for evaluation in evaluations)
    assert all(evaluations for evaluations in counts.values())

    containers.engine.run("stop", "--time=30", *containers.names, timeout=240)
    assert {name: containers.inspect(name, "{{.State.ExitCode}}") for name in containers.names} == dict.fromkeys(
        containers.names, "0"
    )
    for name in INSTITUTIONS:
        ledger = containers.folder / "state" / f"agent-{name}" / "ledger.jsonl"
        summary = run_veilfed("ledger", "verify", ledger, "--bundle", containers.folder / "ca" / "root.pem")
        assert summary["identity"] == f"spiffe://{FEDERATION}/agent/{name}/agent"
        assert summary["countersigned"] > 0
        assert summary["refused"] == 0


def test_aggregator_has_no_torch(engine: Engine, images: dict[str, str]) -> None:
    code = "import importlib.util as u; print(u.find_spec('grpc') is not None, u.find_spec('torch') is not None)"
    python = ["run", "--rm", "--network=none", "--entrypoint=/opt/veilfed/bin/python"]
    assert engine.run(*python, images["aggregator"], "-c", code).split() == ["True", "False"]
    assert engine.run(*python, images["agent"], "-c", code).split() == ["True", "True"]
