"""Jobs on encrypted blocks over all real services, killed in the middle: features and models are the same."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fm_oracle.blocks.release import fixed, secret_of
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.parties import Parties, Party, running_parties
from tests.support.processes import free_port, until
from tests.support.tiny_student import BLOCKS, TINY, TOKENS, tiny_config, tiny_oracle
from veilfed.ledger import read, verify
from veilfed.v1.aggregator_pb2 import GetReportRequest
from veilfed.wire.tensors import digest
from veilfed_study.blind_check import compared

pytestmark = pytest.mark.encrypted

INSTITUTIONS = ["north", "south", "west"]
# As in test_blocks_service: the flood, rounding, and what the arithmetic leaves.
CLOSE = 4e-3


class Blind:
    """The parties, and the vendor with its folder."""

    def __init__(self, parties: Parties, vendor: Party, folder: Path) -> None:
        self.parties, self.vendor, self.folder = parties, vendor, folder

    def start_vendor(self) -> None:
        self.vendor.start()
        self.vendor.process.ready(240)

    @property
    def released(self) -> list[int]:
        version = digest((self.folder / "student.safetensors").read_bytes())
        return list(fixed(secret_of(self.folder / "state"), version, self.parties.federation.name, BLOCKS))


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blind]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)
    folder, address = tmp_path_factory.mktemp("vendor"), f"127.0.0.1:{free_port()}"
    vendor = tiny_oracle(tiny_config(federation, folder, address))
    encrypted = {
        "address": address,
        "identity": str(federation.oracle_id("vendor")),
        "inputs": str(folder / "inputs.safetensors"),
    }
    try:
        vendor.start()
        vendor.process.ready(240)
        with running_parties(
            federation,
            tmp_path_factory.mktemp("parties"),
            INSTITUTIONS,
            strategies={name: ["blindfed"] for name in INSTITUTIONS},
            agents={"encrypted": encrypted},
        ) as parties:
            yield Blind(parties, vendor, folder)
    finally:
        vendor.kill()


@asynchronous
async def test_a_job_whose_passes_are_killed(blind: Blind, tmp_path: Path) -> None:
    parties = blind.parties
    document = {
        "name": "blind",
        "strategy": {
            "name": "blindfed",
            "classes": ["consonants", "vowels"],
            "dimension": TINY.dimension,
            "blocks": BLOCKS,
            "tokens": TOKENS,
            "released": blind.released,
            "rate": 0.1,
        },
        "cohort": {"train": INSTITUTIONS},
        "rounds": 3,
        "quorum": 3,
        "deadline_seconds": 600,
        "secure_aggregation": {"phase_seconds": 20},
    }
    job_id = await parties.submit(document)
    await asyncio.to_thread(blind.vendor.says, "half of a block", '"done": 2', timeout=240)
    blind.vendor.kill()
    await asyncio.to_thread(blind.start_vendor)
    # Whose pass is under way now; each says so.
    agent = await asyncio.to_thread(_computing, parties)
    parties.agents[agent].kill()
    parties.agents[agent].start()
    ended = await parties.ended(job_id, 600)
    assert ended.summary.state == "done", ended.summary.error

    spec = tmp_path / "job.json"
    spec.write_text(json.dumps(document))
    configs = {name: parties.folder / name / "agent.yaml" for name in INSTITUTIONS}
    found = compared(blind.folder / "student.safetensors", spec, configs)
    assert found["largest_difference"] < CLOSE
    assert found["agree_top1"] >= 0.99
    # What the agents decrypted, put through the same rounds once more: the very model that was published under masks.
    published = [item.published_sha256 for item in ended.rounds if item.published_sha256]
    assert found["model_sha256"] == published[-1]
    async with parties.jobs() as jobs:
        report = json.loads((await jobs.GetReport(GetReportRequest(job_id=job_id))).report_json)
    assert report["secure_aggregation"]["institutions_in_the_sum"] == 3
    for name in INSTITUTIONS:
        ledger = parties.folder / name / "state" / "ledger.jsonl"
        verify(ledger, bundle_pem=parties.federation.root.read_bytes())
        records = list(read(ledger))
        sent = {one["purpose"] for one in records if one["kind"] == "message"}
        assert {"evaluation_keys", "ciphertexts", "masking"} <= sent
        assert "embed" not in sent
        tensors = {item["name"] for one in records for item in one.get("tensors", [])}
        assert tensors == {"masked"}
        keys = parties.folder / name / "state" / "encrypted" / "keys.bin"
        assert keys.stat().st_mode & 0o777 == 0o600


def _computing(parties: Parties) -> str:
    """The institution whose agent was the first to say that its pass goes on."""
    lengths = {name: len(agent.log) for name, agent in parties.agents.items()}
    found: list[str] = []

    def said() -> bool:
        for name, agent in parties.agents.items():
            if "computing on ciphertexts" in agent.log[lengths[name] :]:
                found.append(name)
        return bool(found)

    until(said, 240, "a pass that goes on")
    return found[0]
