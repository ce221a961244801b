"""Who is connected: the open Work streams of the agents and those who watch jobs. Event loop only."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aggregator.rounds.records import Live, MaskOffer, Offer
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.v1.aggregator_pb2 import Receipt, WorkResponse

__all__ = ["Hub", "Stream"]

# Offers become messages only when they are sent.
Item = Offer | MaskOffer | WorkResponse

# What may wait for an agent. Who connects is offered the tasks of all its jobs at once; more means that it does not
# read.
MAX_QUEUE = 4096
# A receipt waits so long for a message that goes anyway, such as the next task.
RECEIPT_SECONDS = 0.05


class Stream:
    """One Work stream: what is to be sent down. Offers become messages only when they are sent."""

    def __init__(self, session: str, identity: Identity, now: int) -> None:
        self.session, self.identity = session, identity
        self.last_seen_ms = now
        self._queue: deque[Item] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._error: VeilfedError | None = None
        self._receipts: list[Receipt] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._offered: OrderedDict[str, Offer] = OrderedDict()

    def offered(self, job_id: str, number: int, token: str) -> Offer | None:
        """The offer of this stream that an answer names; the first answer takes it."""
        offer = self._offered.pop(token, None)
        return offer if offer is not None and (offer.job_id, offer.round) == (job_id, number) else None

    def send(self, item: Item) -> None:
        """Queues; nothing happens after the end. Too much of what is not read ends the stream."""
        if self._closed:
            return
        if len(self._queue) == MAX_QUEUE:
            self.close(VeilfedError(Code.SESSION_INVALID, "the agent does not read what it is sent"))
            return
        if isinstance(item, Offer):
            self._offered[item.token] = item
            while len(self._offered) > MAX_QUEUE:
                self._offered.popitem(last=False)
        self._queue.append(item)
        self._changed.set()

    def close(self, error: VeilfedError | None = None) -> None:
        """Ends the stream: with an error at once, in order after what is queued. The first close counts."""
        if not self._closed:
            self._closed, self._error = True, error
            if error is not None:
                self._queue.clear()
            self._changed.set()

    def owe(self, receipt: Receipt) -> None:
        """A receipt goes with the next message, and soon without one."""
        if self._error is None:
            self._receipts.append(receipt)
            if self._alarm is None:
                self._alarm = asyncio.get_running_loop().call_later(RECEIPT_SECONDS, self._changed.set)

    def receipts(self) -> list[Receipt]:
        """The receipts that are to go now."""
        owed, self._receipts = self._receipts, []
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        return owed

    async def next(self) -> Item | None:
        """What to send next, to an offer's message `receipts` belong; None at an orderly end.

        Raises VeilfedError when the stream was closed with one.
        """
        while not self._queue:
            if self._receipts and (self._closed or self._changed.is_set()):
                self._changed.clear()
                return WorkResponse(receipts=self.receipts())
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        item = self._queue.popleft()
        if isinstance(item, WorkResponse):
            item.receipts.extend(self.receipts())
        return item


class Hub:
    """`clock` gives milliseconds since the Unix epoch."""

    def __init__(self, clock: Callable[[], int], lease_ms: int) -> None:
        self._clock, self._lease_ms = clock, lease_ms
        self._streams: dict[str, Stream] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}

    def connect(self, stream: Stream) -> None:
        """Adds a stream; an older stream of the same session ends."""
        before = self._streams.pop(stream.session, None)
        if before is not None:
            before.close(VeilfedError(Code.SESSION_INVALID, "a newer stream of this session was opened"))
        self._streams[stream.session] = stream

    def disconnect(self, stream: Stream) -> None:
        if self._streams.get(stream.session) is stream:
            del self._streams[stream.session]

    def end_session(self, session: str) -> None:
        """Ends the stream of a session that a later Join replaced."""
        stream = self._streams.pop(session, None)
        if stream is not None:
            stream.close(VeilfedError(Code.SESSION_REPLACED, "a later Join of this identity ended this session"))

    def close(self, error: VeilfedError) -> None:
        """Ends all streams with an error, and wakes all watchers."""
        for stream in self._streams.values():
            stream.close(error)
        self._streams.clear()
        for job_id in list(self._watchers):
            self.wake(job_id)

    def live(self) -> Live:
        """The agent of each institution that gets its tasks: of those that are not silent, the longest connected."""
        earliest = self._clock() - self._lease_ms
        found: dict[str, str] = {}
        for stream in self._streams.values():
            if stream.last_seen_ms >= earliest:
                found.setdefault(stream.identity.institution, stream.session)
        return found

    def send(self, session: str, item: Item) -> None:
        """Nothing happens if the session has no stream: what is open is offered again when it has."""
        stream = self._streams.get(session)
        if stream is not None:
            stream.send(item)

    def send_to(self, institution: str, item: Item) -> None:
        """To all agents of an institution: one of them has trained, and knows it."""
        for stream in list(self._streams.values()):
            if stream.identity.institution == institution:
                stream.send(item)

    @contextmanager
    def watching(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the job has changed."""
        event = asyncio.Event()
        self._watchers.setdefault(job_id, set()).add(event)
        try:
            yield event
        finally:
            self._watchers[job_id].discard(event)
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    def wake(self, job_id: str) -> None:
        for event in self._watchers.get(job_id, ()):
            event.set()
