"""The running aggregator: transactions, and what follows from them. Event loop only; work that blocks is in threads."""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from aggregator.artifacts import Artifacts, Ref
from aggregator.hub import Hub, Stream
from aggregator.masking import Masking
from aggregator.privacy_report import privacy_report
from aggregator.rounds import queries, sessions
from aggregator.rounds.book import Job
from aggregator.rounds.masked import Masked
from aggregator.rounds.records import Effects, Inputs, Live, Offer
from aggregator.store.database import Database
from aggregator.strategies import strategy_for
from aggregator.updates import Damaged, fold_plain
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.jobs import parse_job
from veilfed.logs import get_logger
from veilfed.protocol import INLINE_LIMIT, MAX_ARTIFACT_BYTES
from veilfed.v1.aggregator_pb2 import (
    TASK_KIND_EVALUATE,
    TASK_KIND_TRAIN,
    Task,
    TaskEnded,
    WorkResponse,
)
from veilfed.v1.tensor_pb2 import Artifact, TensorMap
from veilfed.wire.tensors import Array, map_bytes, to_map

__all__ = ["Engine", "steady_clock"]

log = get_logger("aggregator.engine")

Result = TypeVar("Result")

TICK_SECONDS = 0.2
RETRY_SECONDS = 5.0
MAX_CACHED_MODELS = 8
# What a fold says that never will succeed.
UNFOLDABLE = frozenset({Code.SINGULAR, Code.UPDATE_INVALID, Code.JOB_FAILED, Code.COHORT_INVALID})


def steady_clock() -> Callable[[], int]:
    """Milliseconds since the Unix epoch, from now on steady: who sets the system's clock ends no round and no lease."""
    start = time.time_ns() - time.monotonic_ns()
    return lambda: (start + time.monotonic_ns()) // 1_000_000


class Engine:
    """Ties the state machine to the database, the artifacts and the connected agents."""

    def __init__(
        self,
        database: Database,
        artifacts: Artifacts,
        lease_seconds: float,
        clock: Callable[[], int] | None = None,
        federation: str = "",
        bundle_pem: bytes = b"",
    ) -> None:
        """`bundle_pem` are the roots of `federation`, under which institutions sign their keys of masked rounds."""
        lease_ms = round(lease_seconds * 1000)
        self.clock = clock = clock or steady_clock()
        self.lease_seconds = lease_seconds
        self.machine = Masked(clock, lease_ms)
        self.hub = Hub(clock, lease_ms)
        self.artifacts = artifacts
        self.masking = Masking(self, federation, bundle_pem)
        self._database = database
        database.on_doubt = self._doubtful
        # What follows from a commit that failed is lost if it has happened, until the timer has looked.
        self._doubt = False
        self._models: OrderedDict[str, TensorMap] = OrderedDict()
        # Of each job: its newest round, and how many of the tasks given out are not answered.
        self._expected: dict[str, tuple[int, int]] = {}
        self._folds: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.stopping = False
        self._chores: set[asyncio.Task[Any]] = set()
        # Jobs that have ended and whose files are being removed.
        self._tidying: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Migrates the database and takes up what was under way."""
        await self._database.open()
        await self.change(self.machine.fail_unreadable)
        await self.change(self.machine.resume)
        await self._clean()
        await self._tick()
        self._timer = asyncio.create_task(self._keep_ticking())

    async def stop(self) -> None:
        """Ends the streams and the timer. What is under way is taken up at the next start."""
        self.stopping = True
        # Updates that are being taken first: their receipts are to go before the streams end.
        await asyncio.gather(*self._chores, return_exceptions=True)
        self.hub.close(VeilfedError(Code.UNREACHABLE, "the aggregator is stopping", "Connect again later."))
        tasks = [*self._folds.values(), *([self._timer] if self._timer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._chores:  # short, and somebody may wait for them
            await asyncio.gather(*self._chores, return_exceptions=True)

    def spawn(self, chore: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """A task that the end of the service waits for."""
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    def _doubtful(self) -> None:
        """A commit has failed, and may have happened: agents come back as after a restart, and get what is theirs.

        Else an agent whose task was given out by that commit would keep it alive by its heartbeats, and never get it.
        """
        log.error("a commit has failed")
        self._doubt = True
        self.hub.close(VeilfedError(Code.INTERNAL, "a fault of the service"))

    async def _clean(self) -> None:
        """Removes the files of jobs that have ended without anybody knowing, such as when the service did."""
        running = await self.run(queries.running)
        for job_id in await asyncio.to_thread(self.artifacts.jobs) - running:
            await self._begin_to_tidy(job_id)

    def _begin_to_tidy(self, job_id: str) -> "asyncio.Task[None]":
        self._tidying[job_id] = self.spawn(self._tidy(job_id))
        return self._tidying[job_id]

    async def _tidy(self, job_id: str) -> None:
        """Removes what is not needed of a job that has ended. Of one that is done, sealed updates stay."""
        try:
            if not await self.run(partial(queries.is_running, job_id=job_id)):
                await asyncio.to_thread(self.artifacts.drop_job, job_id)
                await self._drop_sealed(job_id)
        finally:
            self._tidying.pop(job_id, None)

    async def _drop_sealed(self, job_id: str) -> None:
        keep = await self.run(partial(queries.sealed, job_id=job_id))
        await asyncio.to_thread(self.artifacts.drop_sealed, job_id, keep)

    async def run(self, function: Callable[[Connection], Result]) -> Result:
        """One transaction."""
        return await self._database.run(function)

    async def change(self, function: Callable[[Connection], Effects], first: Callable[[], None] | None = None) -> None:
        """One transition, `first`, and what follows from it: all of it even if who asked has gone meanwhile."""
        await asyncio.shield(self.spawn(self._change(function, first)))

    async def _change(self, function: Callable[[Connection], Effects], first: Callable[[], None] | None) -> None:
        effects = await self.run(function)
        if first is not None:
            first()
        self.apply(effects)

    async def change_live(self, function: Callable[[Connection, Live], Effects]) -> None:
        """A transition that gives tasks to who is connected. Who connected in the meantime gets theirs after it."""
        before = self.hub.live()
        await self.change(lambda connection: function(connection, before))
        for institution, session in self.hub.live().items():
            if before.get(institution) != session:
                await self.change(partial(self._offer, institution=institution, session=session))

    def _offer(self, connection: Connection, institution: str, session: str) -> Effects:
        offers = sessions.offer(connection, session, institution, self.clock(), self.machine.lease_ms)
        return Effects(offers=offers)

    def apply(self, effects: Effects) -> None:
        """Tells agents and watchers, and starts folds. The transaction is committed by now."""
        for ended in effects.ended:
            message = TaskEnded(job_id=ended.job_id, round=ended.round, token=ended.token, reason=ended.reason)
            self.hub.send(ended.session, WorkResponse(ended=message))
        for offer in effects.offers:
            number, count = self._expected.get(offer.job_id, (-1, 0))
            self._expected[offer.job_id] = (offer.round, count + 1 if number == offer.round else 1)
            self.hub.send(offer.session, offer)
        for key, inputs in effects.folds.items():
            if key not in self._folds and not self.stopping:
                self._folds[key] = asyncio.create_task(self._fold(*key, inputs))
        for masked in effects.masked:
            self.spawn(self.masking.begin(masked))
        for job_id in effects.jobs_ended:
            self.machine.forget(job_id)
            self.masking.forget(job_id)
            self._expected.pop(job_id, None)
            log.info("job ended", job=job_id)
            self._begin_to_tidy(job_id)
        for job_id in effects.changed:
            self.hub.wake(job_id)

    def expects_more(self, job_id: str, number: int) -> bool:
        """Counts one answer to a task of a round; tells whether others are likely to come, which is a guess."""
        current, count = self._expected.get(job_id, (-1, 0))
        if current == number:
            self._expected[job_id] = (number, count - 1)
        return current == number and count > 1

    # Time.

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self._tick()
            except Exception as error:  # the timer must outlive a full disk
                log.error("timer", exc_info=error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _tick(self) -> None:
        await self.change_live(self.machine.tick)
        if self._doubt:
            self._doubt = False
            await self._clean()
        await self.masking.tick()

    # Jobs and agents.

    async def submit(self, text: str, class_vectors: Array | None = None) -> str:
        """Starts a job; returns its id. `class_vectors` as Strategy.initial.

        Raises VeilfedError: JOB_INVALID; PACKAGE_MISSING for a job with privacy.
        """
        spec = await asyncio.to_thread(parse_job, text)
        if spec.privacy is not None:  # rather than with its first model
            await asyncio.to_thread(privacy_report, spec, 0)
        strategy = strategy_for(spec)
        if strategy.model_bytes > MAX_ARTIFACT_BYTES:
            raise VeilfedError(Code.JOB_INVALID, f"job: the model is larger than {MAX_ARTIFACT_BYTES} bytes")
        model = await asyncio.to_thread(lambda: self.artifacts.put_model(map_bytes(strategy.initial(class_vectors))))
        job_id = ""

        def submit(connection: Connection, live: Live) -> Effects:
            nonlocal job_id
            job_id, effects = self.machine.submit(connection, spec, model, live)
            return effects

        await self.change_live(submit)
        log.info("job submitted", job=job_id, rounds=spec.rounds, clients=len(spec.cohort.train))
        return job_id

    async def cancel(self, job_id: str, by: Identity) -> None:
        await self.change(partial(self.machine.cancel, job_id=job_id, by=by))

    async def change_job(self, job_id: str, change: Callable[[Connection, Live], tuple[int, Effects]]) -> int:
        """A change of a job that is done, see aggregator.rounds.changes: the number of its round. Errors as there."""
        if job_id in self._tidying:  # or it would tidy up what the change brings
            await asyncio.shield(self._tidying[job_id])
        number = 0

        def begin(connection: Connection, live: Live) -> Effects:
            nonlocal number
            number, effects = change(connection, live)
            return effects

        await self.change_live(begin)
        log.info("job is changed", job=job_id, round=number)
        return number

    async def forget_client(self, job_id: str, institution: str, by: Identity) -> int:
        """As `change_job`; the statistics are deleted when this returns."""
        forget = partial(self.machine.forget_client, job_id=job_id, institution=institution, by=by)
        number = await self.change_job(job_id, lambda connection, _: forget(connection))
        # Nobody sends any now: the round asks nobody, and the one after it only evaluates.
        await asyncio.shield(self.spawn(self._drop_sealed(job_id)))
        return number

    async def join(self, identity: Identity, software_version: str) -> str:
        """A new session; the identity's older one ends, even if who asked has gone meanwhile. Returns its secret."""
        return await asyncio.shield(self.spawn(self._join(identity, software_version)))

    async def _join(self, identity: Identity, software_version: str) -> str:
        secret, before = await self.run(
            partial(sessions.join, identity=identity, software_version=software_version, now=self.clock())
        )
        if before:
            self.hub.end_session(before)
        log.info("agent joined", identity=str(identity))
        return secret

    async def connect(self, session: str, identity: Identity) -> Stream:
        """A stream for the session (digest), with its open tasks. Raises VeilfedError(SESSION_INVALID)."""
        await self.run(partial(sessions.check, session=session, identity=identity))
        stream = Stream(session, identity, self.clock())
        self.hub.connect(stream)
        live = self.hub.live()

        def offer(connection: Connection) -> Effects:
            sessions.check(connection, session, identity)
            now, institution = self.clock(), identity.institution
            sessions.renew(connection, session, "connected", now, self.machine.lease_ms)
            offers = sessions.offer(connection, session, institution, now, self.machine.lease_ms, again=True)
            effects = self.machine.open_pending(connection, live, institution)
            effects.offers = offers + effects.offers
            return effects

        try:
            await self.change(offer)
            await self.masking.offer(stream)
        except BaseException:
            self.hub.disconnect(stream)
            raise
        return stream

    async def heartbeat(self, stream: Stream, activity: str) -> None:
        stream.last_seen_ms = self.clock()

        def renew(connection: Connection) -> Effects:
            sessions.renew(connection, stream.session, activity, self.clock(), self.machine.lease_ms)
            return self._offer(connection, stream.identity.institution, stream.session)

        await self.change(renew)

    # Models.

    async def task(self, offer: Offer) -> WorkResponse:
        """The message of an offer."""
        job = await self.job(offer.job_id)
        task = Task(
            job_id=offer.job_id,
            round=offer.round,
            kind=TASK_KIND_TRAIN if offer.trains else TASK_KIND_EVALUATE,
            token=offer.token,
            spec_json=offer.spec_json or job.spec_json,
            deadline_unix_ms=offer.deadline_ms,
        )
        if offer.model.size > INLINE_LIMIT:
            task.artifact.CopyFrom(Artifact(sha256=offer.model.sha256, size=offer.model.size))
        else:
            task.tensors.CopyFrom(await self._inline(offer.model.sha256))
        return WorkResponse(task=task)

    async def job(self, job_id: str) -> Job:
        """Raises VeilfedError(NOT_FOUND)."""
        found = self.machine.remembered(job_id)
        return found if found is not None else await self.run(lambda c: self.machine.job(c, job_id))

    async def _inline(self, sha256: str) -> TensorMap:
        message = self._models.get(sha256)
        if message is None:
            message = TensorMap.FromString(await asyncio.to_thread(self.artifacts.model, sha256))
        self._remember(sha256, message)
        return message

    def _remember(self, sha256: str, model: TensorMap) -> None:
        """Keeps a model that travels inline at hand."""
        self._models[sha256] = model
        self._models.move_to_end(sha256)
        while len(self._models) > MAX_CACHED_MODELS:
            self._models.popitem(last=False)

    # Folding.

    async def _fold(self, job_id: str, number: int, inputs: Inputs | None) -> None:
        """Folds a round from the kept updates and publishes the result."""
        try:
            job = await self.job(job_id)
            if inputs is None:
                inputs = await self.run(partial(self.machine.inputs, job_id=job_id, number=number))
            try:
                folded = await self._folded(job, number, inputs)
            except Damaged as damaged:
                log.error("updates are damaged", job=job_id, round=number, institutions=damaged.institutions)
                lost = partial(self.machine.lose, job_id=job_id, number=number, institutions=damaged.institutions)
                await self.change(lost)
                return  # the timer folds again what is left
            except VeilfedError as error:
                if error.code not in UNFOLDABLE:
                    raise
                log.error("the round cannot be folded", job=job_id, round=number, error=error.message)
                text = f"{error.code.name}: {error.message}"
                await self.change(partial(self.machine.fail_fold, job_id=job_id, number=number, message=text))
                return
            if folded is None:
                return
            model, message, report = folded
            if message is not None:
                self._remember(model.sha256, message)
            await self.change_live(
                lambda connection, live: self.machine.publish(connection, job_id, number, model, live, report)
            )
            if job.spec.secure_aggregation or any(item.parameters is None for item in inputs.updates):
                await asyncio.to_thread(self.artifacts.drop_updates, job_id, number)
        except Exception as error:  # such as a full disk: the round stays, and is tried again
            log.error("folding failed", job=job_id, round=number, exc_info=error)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._folds.pop((job_id, number), None)

    async def _folded(self, job: Job, number: int, inputs: Inputs) -> tuple[Ref, TensorMap | None, str] | None:
        """Folds and keeps the next model; gives it itself too if it travels inline, and its report as JSON.

        None if the round is not folded any more.
        """
        if job.spec.secure_aggregation is None:
            arrays, report = await asyncio.to_thread(fold_plain, self.artifacts, job, number, inputs)
        else:
            made = await self.masking.fold(job, number)
            if made is None:
                return None
            arrays, report = made
        if job.spec.privacy is not None:
            report = {**report, "privacy": privacy_report(job.spec, number)}
        model = to_map(arrays)
        data = model.SerializeToString(deterministic=True)
        ref = await asyncio.to_thread(self.artifacts.put_model, data)
        return ref, model if ref.size <= INLINE_LIMIT else None, json.dumps(report) if report else ""
