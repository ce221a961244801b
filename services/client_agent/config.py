"""The agent's configuration file."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from client_agent.data.config import DataConfig
from client_agent.egress.policy import EgressPolicy
from veilfed.config import Strict
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import TlsFiles
from veilfed.identity.names import LABEL, Identity, Role
from veilfed.packages import default_folder

__all__ = ["AgentConfig", "AggregatorEndpoint", "EncryptedConfig", "OracleEndpoint", "SecureAggregationConfig"]


def _parse(value: Any) -> Any:
    """An identity from its text; pydantic turns a ValueError into a problem with line and key."""
    if not isinstance(value, str):
        return value
    try:
        return Identity.parse(value)
    except VeilfedError as error:
        raise ValueError(error.message) from None


ServerIdentity = Annotated[Identity, BeforeValidator(_parse)]
Name = Annotated[str, Field(pattern=rf"^{LABEL}$")]
Address = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]


class AggregatorEndpoint(Strict):
    """The coordinator's service."""

    # host:port
    address: Address
    identity: ServerIdentity
    # Silence after which the agent asks whether the connection still stands.
    keepalive_seconds: float = Field(default=30, ge=0.1, le=3600)

    @model_validator(mode="after")
    def _role(self) -> Self:
        if self.identity.role is not Role.AGGREGATOR:
            raise ValueError("identity: not that of an aggregator")
        return self


class _OracleAt(Strict):
    """An oracle, wherever it is."""

    address: Address
    identity: ServerIdentity

    @model_validator(mode="after")
    def _role(self) -> Self:
        if self.identity.role is not Role.ORACLE:
            raise ValueError("identity: not that of an oracle")
        return self


class OracleEndpoint(_OracleAt):
    """The model owner's service, sealed, in the institution's own zone."""

    # The root certificate of the institution's own zone: the only one that this channel trusts.
    root: Path


class EncryptedConfig(_OracleAt):
    """The model owner's service on ciphertexts, in the owner's zone: it sees ciphertexts alone."""

    # What the owner has published to prepare inputs with.
    inputs: Path
    # Threads of encryption and decryption.
    threads: int = Field(default=1, ge=1, le=256)


class SecureAggregationConfig(Strict):
    """With whom this institution adds up what it sends, in jobs with secure aggregation."""

    # Institutions that it knows to be such: the federation's authority could certify others.
    roster: list[Name] = Field(min_length=1)
    # Institutions in a sum, this one included, without which it takes no part.
    min_cohort: int = Field(default=3, ge=2)
    # Whether jobs without secure aggregation are refused if what they send could be added up.
    required: bool = False


class AgentConfig(Strict):
    """`veilfed agent serve --config FILE`."""

    identity: TlsFiles
    aggregator: AggregatorEndpoint
    # Without it, jobs that need embeddings are refused.
    oracle: OracleEndpoint | None = None
    # Without it, jobs on encrypted blocks (`blindfed`) are refused. Needs the extra `encrypted`.
    encrypted: EncryptedConfig | None = None
    # Where the institution's samples come from.
    data: DataConfig
    # Share of the samples that is never trained on, of each class.
    test_fraction: float = Field(default=0.4, gt=0, lt=1)
    # Folder for what must survive a restart: private states of jobs, ledger, cache of embeddings.
    state: Path
    # Where `veilfed data fetch` put public data; by default veilfed.packages.default_folder().
    packages: Path | None = None
    policy: EgressPolicy = EgressPolicy()
    # Without it, jobs with secure aggregation are refused.
    secure_aggregation: SecureAggregationConfig | None = None
    # Threads of the training's arithmetic.
    threads: int = Field(default=1, ge=1, le=256)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _some_oracle(self) -> Self:
        if self.oracle is None and self.encrypted is None:
            raise ValueError("oracle: without it nothing can be embedded, unless there is `encrypted`")
        return self

    @property
    def own_oracle(self) -> OracleEndpoint:
        """Raises VeilfedError(POLICY_DENIED) where there is none."""
        if self.oracle is None:
            raise VeilfedError(Code.POLICY_DENIED, "this institution has no oracle of its own that embeds its samples")
        return self.oracle

    @property
    def packages_folder(self) -> Path:
        return self.packages or default_folder()
