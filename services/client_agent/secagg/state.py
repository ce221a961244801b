"""What an institution must remember of one attempt: bytes to be kept before anything that follows from them is sent."""

import base64
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from veilfed.errors import Code, VeilfedError
from veilfed.secagg import Context, Format

__all__ = ["Kept"]


@dataclass(frozen=True)
class Kept:
    """Keys, shares and choices all follow from `seed`; the rest is what was answered, so that it is answered once."""

    job_id: str
    round: int
    attempt: int
    spec_sha256: str
    narrow: int
    wide: int
    seed: bytes
    # Serialised MaskingCohort and Delivery that were accepted.
    cohort: bytes = b""
    delivery: bytes = b""
    # SHA-256 of the vector that was masked.
    vector: str = ""
    survivors: tuple[int, ...] = ()
    # Shares were given out: nothing of this round may be summed again.
    revealed: bool = False

    @classmethod
    def new(cls, context: Context, seed: bytes) -> Self:
        form = context.form
        return cls(
            context.job_id, context.round, context.attempt, context.spec_sha256, form.narrow, form.wide, seed=seed
        )

    @property
    def context(self) -> Context:
        return Context(self.job_id, self.round, self.attempt, self.spec_sha256, Format(self.narrow, self.wide))

    def after(self, **values: Any) -> "Kept":
        return replace(self, **values)

    def to_bytes(self) -> bytes:
        fields = asdict(self)
        for name in ("seed", "cohort", "delivery"):
            fields[name] = base64.b64encode(fields[name]).decode()
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises VeilfedError(STATE_CORRUPT)."""
        try:
            fields = json.loads(data)
            for name in ("seed", "cohort", "delivery"):
                fields[name] = base64.b64decode(fields[name])
            return cls(**{**fields, "survivors": tuple(fields["survivors"])})
        except (ValueError, TypeError, KeyError):
            raise VeilfedError(Code.STATE_CORRUPT, "the kept secrets of a masked round cannot be read") from None
