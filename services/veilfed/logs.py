"""Structured logs: one JSON object per line on standard error. Never data, keys, tokens or embeddings."""

import logging
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

from veilfed.errors import Code, VeilfedError

__all__ = ["configure", "get_logger"]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was raised from or during, the first to happen last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _exception_places(_logger: object, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Puts the type of an exception and where it was raised into an event.

    Neither its text nor the variables of its frames, as structlog's own renderer does: both may hold raw data or keys.
    """
    info = event.pop("exc_info", None)
    if isinstance(info, tuple):
        info = info[1]
    elif info is not None and not isinstance(info, BaseException):
        info = sys.exc_info()[1] if info else None
    if info is not None:
        event["exception"] = [
            {
                "type": type(error).__name__,
                "frames": [
                    f"{frame.filename}:{frame.lineno} {frame.name}"
                    for frame in traceback.extract_tb(error.__traceback__)
                ],
            }
            for error in _causes(info)
        ]
    return event


class _Lenient:
    """Standard error, where a line is lost rather than a service: the log may lie on the disk that is full."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def configure(level: str = "info") -> None:
    """Sets up logging for a process; `level` is debug, info, warning or error. Raises VeilfedError(INPUT_INVALID)."""
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise VeilfedError(Code.INPUT_INVALID, "a log level is debug, info, warning or error")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _exception_places,
            structlog.processors.JSONRenderer(sort_keys=True),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Lenient())),
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of a component, such as "aggregator.rounds"."""
    # Not `.bind(...)`, which would fix the settings before `configure` is called: loggers are made at import.
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger
