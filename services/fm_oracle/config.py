"""The oracle's configuration file."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fm_oracle.gate import Limits
from fm_oracle.models import registry
from veilfed.config import Strict
from veilfed.errors import VeilfedError
from veilfed.identity.material import TlsFiles
from veilfed.identity.names import LABEL
from veilfed.packages import default_folder

__all__ = ["EncryptedConfig", "OracleConfig"]

Quota = Annotated[int, Field(ge=0)]
# Another spelling would be nobody's, and who was to be shut out would not be.
Institution = Annotated[str, Field(pattern=rf"^{LABEL}$")]


class EncryptedConfig(Strict):
    """A student that is computed on ciphertexts; see docs/how-to/serve-encrypted-blocks.md."""

    # What `veilfed oracle distill` has written, and `veilfed oracle publish-inputs` beside it.
    student: Path
    inputs: Path
    # How long an institution's keys are kept after it has opened a session.
    session_hours: float = Field(default=168.0, gt=0, le=24 * 366, allow_inf_nan=False)
    # Threads of the arithmetic.
    threads: int = Field(default=2, ge=1, le=256)


class OracleConfig(Strict):
    """`veilfed oracle serve --config FILE`."""

    identity: TlsFiles
    # Address and port; port 0 takes a free one.
    listen: str
    # "minilm" (text), "vit" (images), one of another library such as "open_clip:ViT-B-32" (extra `encoders`), or one
    # that another package adds by the entry points `veilfed.models`. Without one no embeddings are given out.
    model: str | None = None
    # Where `veilfed oracle fetch` put the model; by default veilfed.packages.default_folder().
    folder: Path | None = None
    # Folder for what must survive a restart: the counts of released embeddings.
    state: Path
    # Embeddings that each institution may ask for in all; no limit by default.
    quota: Quota | None = None
    # The same for single institutions.
    quotas: dict[Institution, Quota] = Field(default_factory=dict)
    # Embeddings per second of each institution in the long run; no limit by default.
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    # Embeddings that may be asked for at once after a pause.
    burst: int = Field(default=256, ge=1)
    # How long a request is held back to keep the rate, before it is refused.
    rate_wait_seconds: float = Field(default=30.0, ge=0, le=3600)
    # Most inputs of one request, and of one pass of the model over requests of several clients.
    max_batch: int = Field(default=64, ge=1, le=1024)
    # How long the model waits for more inputs when fewer than max_batch are there.
    batch_wait_ms: float = Field(default=2.0, ge=0, le=1000)
    # Requests of one stream that are worked on at a time; the next is read when one is answered.
    read_ahead: int = Field(default=4, ge=1, le=64)
    # Streams of one institution at a time.
    max_streams: int = Field(default=16, ge=1, le=1024)
    # What a client may do with prompt tokens, where the model takes them: nothing, have inputs embedded with them, or
    # also have gradients with respect to them.
    prompts: Literal["off", "forward", "gradients"] = "forward"
    # Blocks on ciphertexts; needs the extra `encrypted`.
    encrypted: EncryptedConfig | None = None
    # Threads of the model's arithmetic.
    threads: int = Field(default=1, ge=1, le=256)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("model")
    @classmethod
    def _installed(cls, model: str | None) -> str | None:
        if model is None:
            return None
        try:
            registry.check_name(model)
        except VeilfedError as error:
            raise ValueError(error.message) from None
        return model

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model is None and self.encrypted is None:
            raise ValueError("model: without it there is nothing to serve, unless there is `encrypted`")
        if self.burst < self.max_batch:
            raise ValueError("burst: must be at least max_batch, or a full request could never pass")
        return self

    @property
    def packages(self) -> Path:
        return self.folder or default_folder()

    @property
    def limits(self) -> Limits:
        return Limits(self.quota, self.quotas, self.rate, self.burst, self.rate_wait_seconds)
