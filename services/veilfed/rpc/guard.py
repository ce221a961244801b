"""What every call passes before its handler: identity, TLS version, role; and every error after it.

One chain in one place: log -> translate errors -> authenticate -> authorise -> handler.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity, Role
from veilfed.logs import get_logger
from veilfed.rpc.progress import STALL_SECONDS, moving
from veilfed.rpc.roles import OPEN

__all__ = ["CODE_KEY", "HINT_KEY", "Guard", "peer"]

log = get_logger("rpc.server")

CODE_KEY = "veilfed-code"
HINT_KEY = "veilfed-hint"

# Errors travel in trailing metadata, whose length is limited: a longer text would replace the error by another.
MAX_MESSAGE = 2000
MAX_HINT = 500

# A service's own files. Callers would take these codes for their own, and learn of its folders; after INTERNAL, they
# try again.
OWN_FILES = frozenset({Code.FILE_UNUSABLE, Code.STATE_CORRUPT})

# Stands for a message that could not be parsed, until the call has been admitted.
_UNREADABLE = object()

_peer: ContextVar[Identity] = ContextVar("peer")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def peer() -> Identity:
    """The identity of the connection of the current call; only inside a handler."""
    return _peer.get()


def _check_version(context: Context) -> None:
    properties: Mapping[str, Any] = context.auth_context()
    if properties.get("ssl_tls_version") != [b"TLSv1.3"]:
        raise VeilfedError(Code.UNAUTHENTICATED, "the connection is not TLS 1.3")


def _authenticate(context: Context) -> Identity:
    properties: Mapping[str, Any] = context.auth_context()
    if "peer_spiffe_id" not in properties:
        raise VeilfedError(Code.UNAUTHENTICATED, "the connection has no identity")
    return Identity.parse(properties["peer_spiffe_id"][0].decode())


def _authorise(identity: Identity, method: str, roles: Mapping[str, frozenset[Role]], federation: str) -> None:
    if identity.federation != federation:
        raise VeilfedError(Code.UNAUTHENTICATED, f"{identity} is not of the federation {federation}")
    if identity.role not in roles.get(method, frozenset()):
        raise VeilfedError(Code.ROLE_DENIED, f"{identity} may not call {method}")


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 4] + " ..."


def _tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """grpc would answer bytes that are no message with a fault of the service, and log a traceback for each."""
    if deserializer is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return _UNREADABLE

    return parse


def _readable(request: Any, method: str) -> Any:
    if request is _UNREADABLE:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"{method}: these bytes are not its message")
    return request


async def _all_readable(requests: AsyncIterator[Any], method: str) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request, method)


async def _abort(context: Context, method: str, error: Exception) -> None:
    """Ends the call with the error's status; anything that is not of the catalogue becomes INTERNAL, without detail."""
    if not isinstance(error, VeilfedError):
        log.error("unexpected error in a handler", method=method, exc_info=error)
        error = VeilfedError(Code.INTERNAL, "a fault of the service")
    elif error.code in OWN_FILES:
        log.error("the service cannot use its files", method=method, error=str(error))
        error = VeilfedError(Code.INTERNAL, "the service cannot use its files at the moment")
    elif error.code is Code.INTERNAL:
        log.error("internal error", method=method, error=str(error), exc_info=error)
    hint = error.hint.encode("ascii", "replace").decode()
    metadata = ((CODE_KEY, error.code.name), (HINT_KEY, _shortened(hint, MAX_HINT)))
    await context.abort(error.code.status, _shortened(error.message, MAX_MESSAGE), metadata)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Lets calls through whose identity's role is listed for the method; translates errors.

    Without `federation` (the enrolment service, whose callers have no certificate yet) every caller is let through to
    the methods that are open, and to no other. Calls end whose client sends no more of an upload, or does not read
    what it is sent, for `stall_seconds`.
    """

    def __init__(
        self, roles: Mapping[str, frozenset[Role]], federation: str | None, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self._roles = roles
        self._federation = federation
        self._stall_seconds = stall_seconds

    def _admit(self, method: str, context: Context) -> None:
        _check_version(context)
        if self._federation is None:
            if method not in OPEN:
                raise VeilfedError(Code.UNAUTHENTICATED, f"{method} needs a certificate of the federation")
            return
        identity = _authenticate(context)
        _authorise(identity, method, self._roles, self._federation)
        _peer.set(identity)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None:
            return handler
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            guarded: Any = self._streaming(method, inner, handler.request_streaming)
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            guarded = self._unary(method, inner, handler.request_streaming)
        return make(guarded, _tolerant(handler.request_deserializer), handler.response_serializer)

    def _unary(self, method: str, inner: Any, many: bool) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            started = time.monotonic()
            try:
                self._admit(method, context)
                if many:
                    request = moving(_all_readable(request, method), method, self._stall_seconds)
                else:
                    request = _readable(request, method)
                return await inner(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # the boundary of the service
                return await _abort(context, method, error)
            finally:
                log.debug("call", method=method, seconds=round(time.monotonic() - started, 4))

        return call

    def _streaming(self, method: str, inner: Any, many: bool) -> Callable[[Any, Context], Awaitable[None]]:
        async def call(request: Any, context: Context) -> None:
            started = time.monotonic()
            try:
                self._admit(method, context)
                check = _all_readable if many else _readable
                responses = inner(check(request, method), context)
                if inspect.isawaitable(responses):  # a handler that writes to the context itself (health's Watch)
                    await responses
                    return
                async with aclosing(responses):
                    async for response in responses:
                        await self._write(method, context, response)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # the boundary of the service
                await _abort(context, method, error)
            finally:
                log.debug("stream", method=method, seconds=round(time.monotonic() - started, 4))

        return call

    async def _write(self, method: str, context: Context, response: Any) -> None:
        """Sends a response, as soon as the client has room for it."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await context.write(response)
        except TimeoutError:
            seconds = self._stall_seconds
            raise VeilfedError(Code.TIMEOUT, f"{method}: nothing was read for {seconds:g} seconds") from None
