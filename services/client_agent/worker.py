"""One task, from its offer to its answer: consent, model, embeddings, computation, update or refusal."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from client_agent import work
from client_agent.backoff import Backoff
from client_agent.config import SecureAggregationConfig
from client_agent.coordinator_client import Session
from client_agent.egress import EgressGate
from client_agent.features import Features
from client_agent.masking import check_secure, expectation
from client_agent.prompting import Prompting
from client_agent.state import Finished, JobFolder
from client_agent.work import Order, Prepared
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import BlindfedStrategy, FedopalStrategy, JobSpec, payload_bytes
from veilfed.logs import get_logger
from veilfed.v1.aggregator_pb2 import TASK_KIND_EVALUATE, TASK_KIND_TRAIN, Evaluation, Task, TaskRefusal, Update
from veilfed.wire.tensors import digest

__all__ = ["Desk", "Link", "Worker"]

log = get_logger("agent.work")

Result = TypeVar("Result")

CONSENT_POLL_SECONDS = 0.3

AGAIN_SECONDS = 1.0

# What passes by itself, or with the help of whoever runs the oracle: tried again until the task has ended.
TRANSIENT = frozenset(
    {
        Code.UNREACHABLE,
        Code.TLS_REFUSED,
        Code.TIMEOUT,
        Code.RATE_LIMITED,
        Code.CANCELLED,
        Code.SESSION_INVALID,
        Code.SESSION_REPLACED,
        Code.INTERNAL,
    }
)

# What the aggregator is told. Messages may name the institution's classes and files: they stay in its own log.
REASONS = {
    Code.POLICY_DENIED: "the institution's policy does not allow this",
    Code.JOB_INVALID: "the job's specification is not acceptable, or has changed",
    Code.DATA_INVALID: "the institution's data does not fit the job",
    Code.DATA_MISSING: "the institution's data is not there",
    Code.FILE_UNUSABLE: "a file or folder of the institution cannot be used",
    Code.INPUT_INVALID: "the job does not fit the institution's oracle",
    Code.QUOTA_EXCEEDED: "the institution's quota at its oracle is used up",
    Code.TASK_INVALID: "the task does not fit what the institution has done before",
    Code.UPDATE_INVALID: "training diverged",
    Code.PROTOCOL_VIOLATION: "a message was malformed",
    Code.STATE_CORRUPT: "the institution's state of this job is damaged",
}
OTHER_REASON = "the institution could not do the task"

MAX_PREPARED = 8

# Room for the names and shapes around the elements of a serialised model.
FRAME_BYTES = 1024


class Link:
    """The session that there is at the moment, if any."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._connected = asyncio.Event()

    def attach(self, session: Session) -> None:
        self.session = session
        self._connected.set()

    def detach(self) -> None:
        self.session = None
        self._connected.clear()

    async def get(self) -> Session:
        """The session, as soon as there is one."""
        while self.session is None:
            await self._connected.wait()
        return self.session


@dataclass
class Desk:
    """What the workers of one agent share."""

    institution: str
    test_fraction: float
    gate: EgressGate
    # None where this institution takes part in no job with secure aggregation.
    secure_aggregation: SecureAggregationConfig | None
    features: Features
    # One thread: computations wait for each other.
    arithmetic: Executor
    link: Link
    prepared: dict[str, Prepared] = field(default_factory=dict)
    # Jobs whose consent is in the ledger.
    consented: set[str] = field(default_factory=set)


class Worker:
    """Works on one task until it is answered. `token` may be replaced when the same task is offered again."""

    def __init__(
        self,
        desk: Desk,
        folder: JobFolder,
        task: Task,
        on_activity: Callable[["Worker"], None],
        delay_seconds: float = 0.0,
    ) -> None:
        self._desk = desk
        self._folder = folder
        self._task = task
        self._on_activity = on_activity
        self._delay_seconds = delay_seconds
        self._stopped = threading.Event()
        self._model = bytearray()
        self.token = task.token
        self.activity = "waiting"
        self.running = asyncio.create_task(self._run())

    def same(self, task: Task) -> bool:
        """Whether another offer is of this very task, but for the token."""
        mine = self._task
        return (mine.job_id, mine.round, mine.kind, mine.spec_json, _model_name(mine)) == (
            task.job_id,
            task.round,
            task.kind,
            task.spec_json,
            _model_name(task),
        )

    def cancel(self) -> None:
        """Stops; what is half-trained is thrown away."""
        self._stopped.set()
        self.running.cancel()

    def again(self) -> "Worker":
        """A new worker on the same task, which begins after a pause."""
        task = Task()
        task.CopyFrom(self._task)
        task.token = self.token
        return Worker(self._desk, self._folder, task, self._on_activity, AGAIN_SECONDS)

    async def _run(self) -> None:
        await asyncio.sleep(self._delay_seconds)
        delays = Backoff(first_seconds=0.2)
        while not self._stopped.is_set():
            try:
                await self._attempt()
                return
            except VeilfedError as error:
                if error.code not in TRANSIENT and await self._refuse(error):
                    return
                log.warning("task delayed", job=self._task.job_id, round=self._task.round, **_told(error))
            except Exception as error:  # a defect: the round must not wait for it, nor the log hold what it touched
                place = _place(error)
                log.error("task failed", job=self._task.job_id, error=type(error).__name__, place=place)
                await self._refuse(VeilfedError(Code.INTERNAL, f"a defect at {place}"))
                return
            await asyncio.sleep(delays.delay())

    async def _attempt(self) -> None:
        task = self._task
        if task.kind not in {TASK_KIND_TRAIN, TASK_KIND_EVALUATE}:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, f"an unknown kind of task, {task.kind}")
        spec = await asyncio.to_thread(self._folder.offer, task.spec_json)
        await self._consent(spec)
        trains = self._desk.institution in spec.cohort.train
        if not trains and self._desk.institution not in spec.cohort.evaluate:
            raise VeilfedError(Code.TASK_INVALID, "the job's cohort does not list this institution")
        # More than the specification says was not consented to.
        if task.round > spec.last_round or (task.kind == TASK_KIND_TRAIN and spec.closes(task.round)):
            raise VeilfedError(Code.TASK_INVALID, f"round {task.round} is not one that the job has, or not of its kind")
        if trains:
            self._desk.gate.policy.privacy.check_job(spec)
        check_secure(spec, self._desk.secure_aggregation, self._desk.institution)
        self._desk.gate.expect(
            task.job_id,
            expectation(spec, task.round % (spec.rounds + 1)) if trains else {},
            rounds=spec.rounds,
            last_round=spec.last_round,
            max_weight=spec.fold.max_weight,
            private=spec.privacy is not None,
            masked=trains and spec.secure_aggregation is not None,
        )
        model = await self._fetch_model(payload_bytes(spec.strategy, spec.strategy.model_shapes))
        order = Order(task.round, task.kind == TASK_KIND_TRAIN, model, digest(model))
        finished = await asyncio.to_thread(work.known, self._folder, order, self._desk.gate.policy)
        if not isinstance(finished, Finished):
            finished = await self._perform(spec, order)
        await self._deliver(spec, finished)

    async def _perform(self, spec: JobSpec, order: Order) -> Finished:
        gate, release = self._desk.gate, spec.release
        if release is not None and order.train:
            # In a thread: the accountant takes a second to load.
            await asyncio.to_thread(gate.check_privacy, self._task.job_id, release, spec.rounds)

        def charge(name: str, sha256: str) -> None:
            if release is not None:
                gate.charge(self._task.job_id, name, release, sha256)

        prepared = await (
            self._prompted(spec, order) if isinstance(spec.strategy, FedopalStrategy) else self._prepare(spec)
        )
        activity = "training" if order.train else "evaluating"
        self._act(activity)
        log.info(activity, job=self._task.job_id, round=order.round)
        return await self._compute(
            partial(work.perform, prepared, self._folder, order, self._desk.gate.policy, self._stopped.is_set, charge)
        )

    async def _prompted(self, spec: JobSpec, order: Order) -> Prepared:
        """The institution's part in one round of a job with prompts, which change from round to round."""
        desk = self._desk
        prompting = Prompting(
            spec, desk.institution, desk.features, desk.gate.policy, self._folder, order, desk.test_fraction
        )
        return await prompting.prepared(desk.arithmetic, self._act, self._stopped.is_set)

    def _act(self, activity: str) -> None:
        if activity != self.activity:
            self.activity = activity
            self._on_activity(self)

    async def _consent(self, spec: JobSpec) -> None:
        """Waits for the institution's consent. Raises VeilfedError(POLICY_DENIED) where it cannot be given."""
        policy, job = self._desk.gate.policy, self._task.job_id
        while True:
            approved = await asyncio.to_thread(lambda: self._folder.approved)
            try:
                policy.check_job(spec.strategy.name, approved)
                break
            except VeilfedError as error:
                if error.code is not Code.CONSENT_MISSING:
                    raise
            if self.activity != "waiting for consent":
                log.info("job waits for consent", job=job, name=spec.name)
            self._act("waiting for consent")
            await asyncio.sleep(CONSENT_POLL_SECONDS)
        if job not in self._desk.consented:
            self._desk.consented.add(job)
            how = "approved by the institution" if approved else "allowed by the policy"
            text = f"job {job}, {spec.strategy.name}: {how}; specification {digest(self._task.spec_json.encode())}"
            self._desk.gate.note("consent", text)

    async def _fetch_model(self, payload: int) -> bytes:
        """The model's bytes, from the task or in chunks; not more than elements of `payload` bytes need."""
        if self._task.WhichOneof("model") == "tensors":
            return self._task.tensors.SerializeToString(deterministic=True)
        if self._task.WhichOneof("model") == "artifact":
            if self._task.artifact.size > payload + FRAME_BYTES:
                raise VeilfedError(Code.PROTOCOL_VIOLATION, "a model that is longer than the job's")
            session = await self._desk.link.get()
            return await session.download(self._task.job_id, self._task.artifact, self._model)
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "a task without a model")

    async def _prepare(self, spec: JobSpec) -> Prepared:
        """The institution's part in the job; made once for each job."""
        desk, job = self._desk, self._task.job_id
        if job not in desk.prepared:
            self._act("embedding")
            if isinstance(spec.strategy, BlindfedStrategy):
                samples, features = await desk.features.blocks(spec.strategy)
            else:
                samples, features = await desk.features.embedded(spec.strategy.dimension)
            prepared = await self._compute(
                partial(work.prepare, spec, desk.institution, samples, features, desk.test_fraction, desk.gate.policy)
            )
            while len(desk.prepared) >= MAX_PREPARED:
                desk.prepared.pop(next(iter(desk.prepared)))
            desk.prepared[job] = prepared
        return desk.prepared[job]

    async def _compute(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._desk.arithmetic, function)

    async def _deliver(self, spec: JobSpec, finished: Finished) -> None:
        """Sends the update. With secure aggregation what was trained follows under masks (client_agent.masking)."""
        self._act("sending")
        parameters = finished.update if spec.sends_plain else b""
        session = await self._desk.link.get()
        update = Update(
            job_id=self._task.job_id,
            round=self._task.round,
            weight=finished.weight if parameters else 0.0,
            evaluations=[
                Evaluation(name=counts.name, correct=counts.correct, total=counts.total)
                for counts in finished.evaluations
            ],
        )
        if len(parameters) > session.inline_limit:
            update.artifact.CopyFrom(await session.upload(self._task.job_id, parameters))
        elif parameters:
            update.tensors.ParseFromString(parameters)
        # Last, because the same task may have come again with another token meanwhile.
        update.token = self.token
        session.send(update)
        log.info("update sent", job=update.job_id, round=update.round, trained=finished.trained)

    async def _refuse(self, error: VeilfedError) -> bool:
        """Tells the aggregator. False where the ledger cannot keep that: nothing leaves until its disk can be used."""
        log.error("task refused", job=self._task.job_id, round=self._task.round, **_told(error))
        reason = REASONS.get(error.code, OTHER_REASON)
        session = await self._desk.link.get()
        refusal = TaskRefusal(
            job_id=self._task.job_id, round=self._task.round, token=self.token, code=error.code.name, reason=reason
        )
        try:
            session.refuse(refusal)
        except VeilfedError as denied:  # the round's deadline says it instead
            log.error("refusal denied", job=self._task.job_id, **_told(denied))
            return denied.code is not Code.FILE_UNUSABLE
        return True


def _told(error: VeilfedError) -> dict[str, Any]:
    return {"code": error.code.name, "message": error.message}


def _model_name(task: Task) -> object:
    """What tells one model from another."""
    return (task.artifact.sha256, task.tensors.SerializeToString(deterministic=True))


def _place(error: BaseException) -> str:
    """Where an exception was raised. A whole traceback could hold data."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    return f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}"
