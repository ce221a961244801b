"""What crosses: all bytes of a whole job over the real services, searched for what must not be there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from client_agent.data.config import VaderConfig
from client_agent.data.source import load
from client_agent.egress.rules import COORDINATOR
from client_agent.state import Finished
from client_agent.trainers import State
from fm_oracle.models.minilm import WEIGHTS
from tests.support.methods import stepwise
from tests.support.recorded import Message, read_recording, recording_command
from veilfed.demo.federation import Federation
from veilfed.demo.processes import Process
from veilfed.demo.run import run_jobs
from veilfed.demo.study import Cell, job_spec
from veilfed.demo.tasks import TASKS, Task
from veilfed.demo.workspace import Workspace
from veilfed.packages import default_folder, locate
from veilfed.v1.aggregator_pb2 import JoinResponse, WorkResponse

NAMES = ("tweets", "amazon", "movies")
EMBED = "/veilfed.v1.Oracle/Embed"
WINDOW = 32  # bytes: eight float32 numbers do not occur by chance

TASK = Task(
    name="vader",
    title="a small run",
    model="minilm",
    domains={name: {"source": "vader", "domain": name, "limit": 60} for name in NAMES},
    classes=TASKS["vader"].classes,
    rounds=1,
    blocks=24,
    classifier_rate=5e-3,
    transform_rate=5e-2,
)


class RecordedFederation(Federation):
    """Every process records its messages."""

    def start(self, name: str, *arguments: str | Path) -> Process:
        folder = self.workspace.folder / "recordings"
        folder.mkdir(exist_ok=True)
        root = Path(__file__).parents[2]
        command = recording_command(folder / f"{name}.rec", arguments)
        process = Process(command, self.workspace.log(name), {"PYTHONPATH": str(root)})
        self._processes[name] = process
        return process


@dataclass
class Run:
    workspace: Workspace
    messages: list[Message]
    oracles: dict[str, str]  # institution -> address of its own oracle


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One FEDOT job with one training round and the closing evaluation: X after it is the only X there is."""
    workspace = Workspace(tmp_path_factory.mktemp("recorded"), TASK)
    federation = RecordedFederation(workspace, default_folder())
    try:
        federation.enroll()
        federation.serve()
        oracles = {name: federation.addresses[f"oracle-{name}"] for name in NAMES}
        run_jobs(federation, [Cell("movies", 50, "orthogonal")], 1)
    finally:
        federation.stop()
    messages = [m for file in sorted((workspace.folder / "recordings").glob("*.rec")) for m in read_recording(file)]
    return Run(workspace, messages, oracles)


def samples(institution: str) -> list[bytes]:
    """The raw texts of an institution that are long enough not to occur by chance."""
    config = VaderConfig(source="vader", domain=institution, limit=60)
    texts = [str(text).encode() for text in load(config, default_folder()).inputs]
    return [text for text in texts if len(text) >= 16]


def windows(array: NDArray[np.generic]) -> Iterator[bytes]:
    """Pieces of an array's bytes, in float32 and in float64, spread over all of it."""
    for dtype in ("<f4", "<f8"):
        data = np.ascontiguousarray(array, dtype=dtype).tobytes()
        for start in range(0, len(data) - WINDOW + 1, max(WINDOW, len(data) // 64 // 8 * 8)):
            piece = data[start : start + WINDOW]
            if len(set(piece)) > 8:  # a run of zeros or ones says nothing
                yield piece


def found(pieces: list[bytes], messages: list[Message]) -> set[tuple[str, str, str]]:
    """(recorder, method, direction) of the messages in which any of the pieces occurs."""
    haystack = b"\x00SEPARATOR\x00".join(message.data for message in messages)
    if not any(piece in haystack for piece in pieces):
        return set()
    return {(m.recorder, m.method, m.direction) for m in messages if any(piece in m.data for piece in pieces)}


def private_states(run: Run) -> list[State]:
    method = stepwise(job_spec(TASK, Cell("movies", 50, "orthogonal"), 1).strategy)
    files = sorted((run.workspace.folder / "institutions").glob("*/agent/state/jobs/*/round-0.bin"))
    finished = [Finished.from_bytes(file.read_bytes(), str(file)) for file in files]
    return [method.read_state(one.state) for one in finished if one.trained]


def formed_transform(state: State) -> NDArray[np.float64]:
    """w_l, block by block, formed plainly."""
    raw = state.tensors["transform"].astype(np.float64)
    skew = (raw - raw.transpose(0, 2, 1)) / 2
    identity = np.eye(raw.shape[1])
    return np.asarray((identity + skew) @ np.linalg.inv(identity - skew))


def test_the_recording_is_whole(run: Run) -> None:
    methods = {(message.method.rsplit("/", 1)[-1], message.direction) for message in run.messages}
    for name in ("Describe", "Embed", "Join", "Work"):
        assert {(name, "out"), (name, "in")} <= methods


@pytest.mark.parametrize("institution", NAMES)
def test_raw_samples_go_to_the_own_zones_oracle_alone(run: Run, institution: str) -> None:
    texts = samples(institution)
    assert len(texts) > 40
    assert found(texts, run.messages) == {(f"agent-{institution}", EMBED, "out")}
    own = [m for m in run.messages if m.recorder == f"agent-{institution}" and m.method == EMBED]
    assert {m.target for m in own} == {run.oracles[institution]}
    sent = b"".join(m.data for m in own if m.direction == "out")
    assert all(text in sent for text in texts), "the control: every sample is found where it must be"


def test_no_transform_occurs_in_any_message(run: Run) -> None:
    states = private_states(run)
    assert len(states) == 2
    for state in states:
        assert np.abs(state.tensors["transform"]).max() > 1e-3, "the transform was trained"
        for secret in (state.tensors["transform"], formed_transform(state), state.means["transform"]):
            pieces = list(windows(secret))
            assert len(pieces) > 50
            assert found(pieces, run.messages) == set()


def test_no_weight_of_the_model_occurs_in_any_message(run: Run) -> None:
    weights = load_file(locate(WEIGHTS, default_folder()))
    assert len(weights) > 90
    pieces = [piece for value in weights.values() for piece in list(windows(value))[:24]]
    assert len(pieces) > 1000
    assert found(pieces, run.messages) == set()


def test_logs_and_ledgers_hold_no_data_keys_or_secrets(run: Run) -> None:
    folder = run.workspace.folder
    written = [file for pattern in ("logs/*", "**/ledger*.jsonl*") for file in folder.glob(pattern)]
    assert {"agent-movies.err", "ledger.jsonl"} <= {file.name for file in written}
    text = b"".join(file.read_bytes() for file in written)
    assert b'"task"' in text, "the control: the logs are read"

    keys = [file for file in folder.glob("**/*") if file.name in {"key.pem", "root.key"}]
    assert len(keys) > 2 * len(NAMES)
    assert {file.stat().st_mode & 0o777 for file in keys} == {0o600}
    lines = [line for file in keys for line in file.read_bytes().splitlines() if b"-----" not in line]
    joins = [m.data for m in run.messages if (m.method, m.direction) == (COORDINATOR + "Join", "in")]
    sessions = [JoinResponse.FromString(data).session.encode() for data in joins]
    work = [m.data for m in run.messages if (m.method, m.direction) == (COORDINATOR + "Work", "in")]
    tokens = [WorkResponse.FromString(data).task.token.encode() for data in work]
    secrets = [*lines, *sessions, *filter(None, tokens), *(sample for name in NAMES for sample in samples(name))]
    assert len(sessions) == len(NAMES)
    assert len(list(filter(None, tokens))) >= 2 * len(NAMES)
    assert [secret for secret in secrets if secret in text] == []


def test_the_search_finds_what_is_there(run: Run) -> None:
    """The controls: the classifier crosses and is found; a planted transform is found."""
    update = next((run.workspace.folder / "institutions").glob("*/agent/state/jobs/*/round-0.bin"))
    trained = Finished.from_bytes(update.read_bytes(), str(update)).update
    assert found([trained[-WINDOW:]], run.messages)
    planted = Message("planted", "", "Work", "out", b"x" + private_states(run)[0].tensors["transform"].tobytes())
    assert found(list(windows(private_states(run)[0].tensors["transform"])), [*run.messages, planted]) == {
        ("planted", "Work", "out")
    }
