"""Structured logs: one JSON object per line on standard error. Never data, keys, tokens or embeddings."""

import logging
import sys

import structlog

__all__ = ["configure", "get_logger"]


def configure(level: str = "info") -> None:
    """Sets up logging for a process; `level` is debug, info, warning or error."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(sort_keys=True),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of a component, such as "aggregator.rounds"."""
    # Not `.bind(...)`, which would fix the settings before `configure` is called: loggers are made at import.
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger
