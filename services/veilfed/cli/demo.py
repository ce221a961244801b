"""`veilfed demo`: all parties on this machine, a whole study on real data."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress

from veilfed import packages
from veilfed.cli import output
from veilfed.cli.demo_blind import demo_blind
from veilfed.demo import report
from veilfed.demo.blind import BLIND
from veilfed.demo.federation import Federation, running
from veilfed.demo.run import Progress, Stopwatch, audit, fetch, run_jobs
from veilfed.demo.study import Cell, cells, figures, round_accuracies
from veilfed.demo.tasks import TASKS, Task
from veilfed.demo.workspace import Institution, Workspace
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.identity.names import Identity
from veilfed.ledger import read
from veilfed.v1.aggregator_pb2 import GetJobResponse

__all__ = ["demo"]


def _task(name: str) -> Task:
    if name not in TASKS:
        raise VeilfedError(Code.INPUT_INVALID, f"there is no task {name!r}", f"Tasks: {', '.join(TASKS)}.")
    return TASKS[name]


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds) or not all(0 <= seed < 2**31 for seed in seeds):
        raise VeilfedError(Code.INPUT_INVALID, "--seeds takes distinct whole numbers, such as 50,77,98")
    return seeds


@contextmanager
def _folder(wanted: Path | None, keep: bool) -> Iterator[Path]:
    """The workspace: the given folder, which must be new, or a temporary one that goes unless it is kept."""
    if wanted is not None:
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise VeilfedError(Code.FILE_UNUSABLE, f"{wanted} is not an empty folder", "Choose another --folder.")
        folder = wanted.absolute()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{wanted}: {error.strerror}") from None
    else:
        folder = Path(tempfile.mkdtemp(prefix="veilfed-demo-"))
    try:
        yield folder
    finally:
        if keep or wanted is not None:
            output.say(f"Everything is kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _print_parties(federation: Federation) -> None:
    workspace, pids = federation.workspace, federation.processes()
    model = f"sealed model {workspace.task.model}"
    rows = [("coordinator", "aggregator", pids["aggregator"], "averages classifiers")]
    for name in workspace.task.domains:
        rows.append((name, "agent", pids[f"agent-{name}"], "data, private transform"))
        rows.append(("", "oracle", pids[f"oracle-{name}"], model))
    output.result(None, output.table(["party", "service", "process", "holds"], rows))


class _Bars(Progress):
    """A bar over the rounds of all jobs, and a line for each job that ends."""

    def __init__(self, bars: progress.Progress, jobs: int, rounds: int) -> None:
        self._bars, self._jobs = bars, jobs
        self._bar = bars.add_task("rounds", total=jobs * (rounds + 1))
        self._ended = 0

    def job_started(self, cell: Cell) -> None:
        doing = "embedding all samples, then training" if self._ended == 0 else "training"
        self._bars.update(self._bar, description=f"{doing} without {cell.held_out}")

    def round_published(self, cell: Cell) -> None:
        self._bars.advance(self._bar)

    def job_ended(self, cell: Cell, job: GetJobResponse) -> None:
        self._ended += 1
        general, personal = round_accuracies(job, cell.held_out)[-1]
        output.say(f"[{self._ended}/{self._jobs}] {job.summary.name}: G {100 * general:.1f}  P {100 * personal:.1f}")


def _run(federation: Federation, seeds: list[int], rounds: int) -> dict[Cell, GetJobResponse]:
    """All jobs of the study."""
    chosen = list(cells(federation.workspace.task, seeds))
    output.say("In the first job every sample is embedded, once; then come the rounds.")
    with output.progress() as bars:
        return run_jobs(federation, chosen, rounds, _Bars(bars, len(chosen), rounds))


@contextmanager
def _started(workspace: Workspace, packages_folder: Path) -> Iterator[Federation]:
    """The running federation; a bar shows how it comes up."""
    bars = output.progress()
    bar = bars.add_task("starting", total=3 + 5 * len(workspace.institutions))

    def step(text: str) -> None:
        bars.update(bar, description=text, advance=1)

    bars.start()
    try:
        with running(workspace, packages_folder, step) as federation:
            bars.stop()
            yield federation
    finally:
        bars.stop()


def _bytes_out(institution: Institution) -> dict[str, int]:
    """What the ledger says has left the agent: bytes by role of the destination."""
    sent: Counter[str] = Counter({"aggregator": 0, "oracle": 0})
    for record in read(institution.ledger):
        if record.get("kind") == "message" and record["decision"] == "passed":
            sent[Identity.parse(record["destination"]).role] += record["bytes"]
    return {str(role): count for role, count in sent.items()}


def _print_ledgers(workspace: Workspace) -> dict[str, dict[str, int]]:
    """Verifies every ledger offline and prints what left each institution."""
    sent = {}
    rows = []
    for institution in workspace.institutions:
        summary = audit(institution)
        counts = sent[institution.name] = _bytes_out(institution)
        records = f"{summary.head.records}, {summary.countersigned}"
        rows.append((institution.name, counts["aggregator"], counts["oracle"], "whole", records))
    columns = ["institution", "to aggregator", "to own oracle", "ledger", "records, countersigned"]
    output.result(None, output.table(columns, rows, "Bytes out, by the institutions' own ledgers"))
    return sent


def demo(
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}; or {BLIND.name}, on ciphertexts.")] = "vader",
    rounds: Annotated[int | None, typer.Option(min=1, help="Training rounds; by default the task's.")] = None,
    seeds: Annotated[str, typer.Option(help="Each seed is a whole study; the figures are means.")] = "50,77,98",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep certificates, states, ledgers and logs.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Work in this folder, and keep it.")] = None,
    packages_folder: Annotated[
        Path | None, typer.Option("--packages", help="Where public models and data are kept.")
    ] = None,
) -> None:
    """Runs FEDOT over the real services: leave one institution out, with and without the private transform.

    With `--task blind`, a job on encrypted blocks of a student that is distilled first: about a quarter of an hour.
    """
    where = packages_folder or packages.default_folder()
    if task == BLIND.name:
        with _folder(folder, keep) as place:
            document = demo_blind(place, where, rounds, _seeds(seeds)[0])
        _write(json_file, document)
        return
    chosen, numbers = _task(task), _seeds(seeds)
    count = rounds or chosen.rounds
    watch = Stopwatch()
    output.say(f"{chosen.name}: {chosen.title}")
    with watch.stage("fetch"):
        fetch(chosen.model, chosen.name, where)
    with _folder(folder, keep) as place:
        workspace = Workspace(place, chosen)
        with watch.stage("services"), _started(workspace, where) as federation:
            _print_parties(federation)
            with watch.stage("jobs"):
                jobs = _run(federation, numbers, count)
        fedot, baseline = (figures(chosen, jobs, transform) for transform in ("orthogonal", "identity"))
        output.result(None, report.rounds_table(jobs))
        output.result(None, report.matrix_table(chosen, fedot))
        output.result(None, report.figures_table(fedot, baseline))
        sent = _print_ledgers(workspace)
    document = report.document(chosen, numbers, count, fedot, baseline, watch.document(), sent, ledger_ok=True)
    _write(json_file, document)


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        write_atomic(path, (json.dumps(document, indent=2) + "\n").encode(), mode=0o644)
    output.say(f"{document['seconds']:.0f} s")
