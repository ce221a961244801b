"""The agent's loop: joins, keeps a session for ever, hands tasks to workers, keeps receipts."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from client_agent.backoff import Backoff
from client_agent.clerk import Clerk
from client_agent.config import AgentConfig
from client_agent.coordinator_client import JoinRefused, Session, join
from client_agent.features import Features
from client_agent.masking import Masker
from client_agent.oracle_client import zone_roots
from client_agent.startup import load_agent_credentials, open_gate
from client_agent.state import StateFolder
from client_agent.worker import Desk, Link, Worker
from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger
from veilfed.rpc.server import say_ready, stop_requested
from veilfed.v1.aggregator_pb2 import Rejection, Task, TaskEnded, WorkResponse
from veilfed.v1.secagg_pb2 import MaskRequest

__all__ = ["Agent", "serve"]

log = get_logger("agent")

# A session that lasted so long was a success: the next failure waits short again.
STABLE_SECONDS = 5.0

# How long the aggregator may take to end the stream of an agent that stops.
GOODBYE_SECONDS = 3.0

# Another process works with this identity. Who came last goes on; joining at once would end its session in turn, and
# neither would finish a task.
REPLACED_SECONDS = 60.0
REPLACED_CAP_SECONDS = 600.0

HEARTBEATS_PER_LEASE = 3

# Jobs at a time. Each waits for consent with its model in memory and its specification on disk.
MAX_JOBS = 256

# Requests of one masked round at a time: a phase has one, and a new session brings it again.
MAX_MASK_REQUESTS = 4


class Agent:
    """One agent. `on_joined` is called at the first join."""

    def __init__(
        self, config: AgentConfig, folder: StateFolder, desk: Desk, on_joined: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._folder = folder
        self._desk = desk
        self._on_joined = on_joined
        self._joined_once = False
        self._stopping = False
        # By job: an agent has one task of a job at a time.
        self._workers: dict[str, Worker] = {}
        # Workers of an earlier session whose tasks were not offered in this one.
        self._unconfirmed: set[Worker] = set()
        # Jobs for which nothing is to be sent any more, once the queue is empty.
        self._settled: set[str] = set()
        self._masker = Masker(config, folder, desk.gate)
        # Answers to masked rounds that are under way, by job.
        self._masking: dict[asyncio.Task[None], str] = {}
        self._nudge = asyncio.Event()
        self._clerk = Clerk(desk.gate, on_kept=lambda receipt: self._over(receipt.job_id, receipt.token))

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set. Raises VeilfedError when joining again cannot help."""
        sessions = asyncio.create_task(self._sessions())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sessions, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not sessions.done():
                await self._say_goodbye(sessions)
            if sessions.done() and not sessions.cancelled():
                sessions.result()
        finally:
            for task in (sessions, stopped):
                task.cancel()
            for worker in self._workers.values():
                worker.cancel()
            for masking in self._masking:
                masking.cancel()
            running = [*self._masking, *(worker.running for worker in self._workers.values())]
            await asyncio.gather(sessions, stopped, self._clerk.close(), *running, return_exceptions=True)

    async def _say_goodbye(self, sessions: "asyncio.Task[None]") -> None:
        """Ends the stream after what is queued, and waits a moment for the aggregator to end it too."""
        log.info("stopping")
        self._stopping = True
        if self._desk.link.session is not None:
            self._desk.link.session.finish()
            await asyncio.wait({sessions}, timeout=GOODBYE_SECONDS)

    async def _sessions(self) -> None:
        """One session after the other."""
        delays, long_delays = Backoff(), Backoff(REPLACED_SECONDS, REPLACED_CAP_SECONDS)
        while not self._stopping:
            started = time.monotonic()
            waiting = delays
            try:
                await self._session()
            except JoinRefused:
                raise
            except VeilfedError as error:
                if error.code is Code.SESSION_REPLACED:
                    waiting = long_delays
                log.warning("no session", code=error.code.name, message=error.message)
            if time.monotonic() - started > STABLE_SECONDS:
                delays.reset()
            if self._stopping:
                return
            pause = waiting.delay()
            if waiting is long_delays:
                log.error(
                    "another process works with this agent's identity; stop one of the two",
                    identity=str(self._desk.gate.identity),
                    next_attempt_seconds=round(pause),
                )
            await asyncio.sleep(pause)

    async def _session(self) -> None:
        # Read each time: a renewed certificate is taken up.
        credentials = await asyncio.to_thread(load_agent_credentials, self._config)
        endpoint = self._config.aggregator
        async with join(credentials, endpoint, self._desk.gate) as session:
            log.info("joined", aggregator=str(endpoint.identity), address=endpoint.address)
            if not self._joined_once:
                self._joined_once = True
                self._on_joined()
            self._desk.link.attach(session)
            self._unconfirmed = set(self._workers.values())
            beating = asyncio.create_task(self._beat(session))
            try:
                async for response in session.responses():
                    self._handle(response)
            finally:
                self._desk.link.detach()
                beating.cancel()

    async def _beat(self, session: Session) -> None:
        """Heartbeats, often enough for the lease and when the institution is asked for its consent."""
        pause = session.lease_seconds / HEARTBEATS_PER_LEASE
        beats = 0
        while True:
            self._nudge.clear()
            session.heartbeat(self._activity())
            self._settle(session)
            try:
                # Not wait_for: that of Python 3.11 loses a cancellation that comes together with the event.
                async with asyncio.timeout(pause):
                    await self._nudge.wait()
            except TimeoutError:
                beats += 1
            if beats == HEARTBEATS_PER_LEASE:
                self._drop_unconfirmed()

    def _activity(self) -> str:
        """The most active thing that is under way."""
        activities = {worker.activity for worker in self._workers.values() if not worker.running.done()}
        for activity in ("training", "evaluating", "embedding", "sending", "waiting for consent", "waiting"):
            if activity in activities:
                return activity
        return "idle"

    def _changed(self, worker: Worker) -> None:
        if worker.activity == "waiting for consent":
            self._nudge.set()

    def _drop_unconfirmed(self) -> None:
        """Ends work that this session's aggregator has not asked for: its round or job ended in the meantime."""
        for worker in self._unconfirmed:
            worker.cancel()
        self._unconfirmed = set()

    def _settle(self, session: Session) -> None:
        """Lets the gate forget jobs for which nothing is under way."""
        if session.idle:
            busy = self._settled & set(self._masking.values())
            for job_id in self._settled - busy:
                self._desk.gate.forget(job_id)
            self._settled = busy

    def _handle(self, response: WorkResponse) -> None:
        for receipt in response.receipts:
            self._clerk.take(receipt)
        kind = response.WhichOneof("body")
        if kind == "task":
            self._take(response.task)
        elif kind == "rejection":
            self._rejected(response.rejection)
        elif kind == "ended":
            self._ended(response.ended)
        elif kind == "mask":
            self._mask(response.mask)

    def _take(self, task: Task) -> None:
        """Starts work on a task, or goes on with it where it is offered again."""
        try:
            folder = self._folder.job(task.job_id)
        except VeilfedError as error:
            log.error("task ignored", code=error.code.name, message=error.message)
            return
        current = self._workers.get(task.job_id)
        if current is None and len(self._workers) >= MAX_JOBS:
            log.error("task ignored", job=task.job_id, reason=f"{MAX_JOBS} jobs are under way")
            return
        self._settled.discard(task.job_id)
        if current is not None:
            self._unconfirmed.discard(current)
            if current.same(task) and not current.running.done():
                current.token = task.token
                return
            current.cancel()
        log.info("task", job=task.job_id, round=task.round, kind=task.kind)
        self._workers[task.job_id] = Worker(self._desk, folder, task, self._changed)

    def _mask(self, request: MaskRequest) -> None:
        """Answers a request of a masked round in the background; the job stays open at the gate until then."""
        session = self._desk.link.session
        if session is None:
            return
        try:
            self._folder.job(request.job_id)
        except VeilfedError as error:
            log.error("masking ignored", code=error.code.name, message=error.message)
            return
        if list(self._masking.values()).count(request.job_id) >= MAX_MASK_REQUESTS:
            log.error("masking ignored", job=request.job_id, reason=f"{MAX_MASK_REQUESTS} requests are under way")
            return
        answering = asyncio.create_task(self._masker.answer(session, request))
        self._masking[answering] = request.job_id
        answering.add_done_callback(self._masked)

    def _masked(self, answering: "asyncio.Task[None]") -> None:
        job_id = self._masking.pop(answering)
        if not answering.cancelled() and (error := answering.exception()) is not None:
            # A defect, or a session that has ended: the round asks again, or goes on without this institution.
            log.error("masking failed", job=job_id, error=type(error).__name__)
        if job_id not in self._workers:
            self._settled.add(job_id)

    def _rejected(self, rejection: Rejection) -> None:
        log.warning(
            "update rejected",
            job=rejection.job_id,
            round=rejection.round,
            code=rejection.code,
            message=rejection.message,
        )
        worker = self._workers.get(rejection.job_id)
        if rejection.code == Code.ARTIFACT_INVALID.name and worker is not None and worker.token == rejection.token:
            # The upload was lost on the way: the round still waits for it.
            worker.cancel()
            self._workers[rejection.job_id] = worker.again()
            return
        self._over(rejection.job_id, rejection.token)

    def _ended(self, ended: TaskEnded) -> None:
        log.info("task ended", job=ended.job_id, round=ended.round, reason=ended.reason)
        self._over(ended.job_id, ended.token)

    def _over(self, job_id: str, token: str) -> None:
        """A task needs no more work. That of a later round of the job goes on."""
        worker = self._workers.get(job_id)
        if worker is None or worker.token != token:
            return
        del self._workers[job_id]
        self._unconfirmed.discard(worker)
        worker.cancel()
        self._settled.add(job_id)


async def serve(config: AgentConfig) -> None:
    """Works until SIGTERM. Raises VeilfedError when the agent cannot start, or joining cannot help."""
    credentials = load_agent_credentials(config)
    if config.oracle is not None:
        zone_roots(config.oracle.root, credentials)  # rather than at the first task
    folder = StateFolder(config.state)
    stop = stop_requested()
    # The number of threads is a property of the thread that calls torch, so the arithmetic's own thread sets it.
    arithmetic = ThreadPoolExecutor(1, "train", initializer=torch.set_num_threads, initargs=(config.threads,))
    with folder.locked(), open_gate(config, credentials, folder.ledger) as gate, arithmetic:
        desk = Desk(
            institution=credentials.identity.institution,
            test_fraction=config.test_fraction,
            gate=gate,
            secure_aggregation=config.secure_aggregation,
            features=Features(config, folder.embeddings, gate),
            arithmetic=arithmetic,
            link=Link(),
        )
        await Agent(config, folder, desk, on_joined=lambda: say_ready("agent")).run(stop)
