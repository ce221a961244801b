"""The configuration of the aggregator."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from veilfed.config import Strict
from veilfed.identity.material import TlsFiles

__all__ = ["AggregatorConfig"]


class AggregatorConfig(Strict):
    """A YAML file with these keys; see `veilfed aggregator serve`."""

    identity: TlsFiles
    listen: str = Field("127.0.0.1:7443", description="host:port; port 0 takes a free one")
    database: str = Field("sqlite:///aggregator.sqlite", description="SQLAlchemy URL")
    artifacts: Path = Field(description="folder of models and uploads, created if missing")
    lease_seconds: float = Field(30, ge=0.1, le=3600, description="an agent that is silent for longer loses its tasks")
    keepalive_seconds: float = Field(
        60,
        ge=0.1,
        le=3600,
        description="silence on a connection after which it is tested; a twelfth is the agents' least",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
