"""SPIFFE-style identities: spiffe://<federation>/<role>/<institution>/<name>."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from veilfed.errors import Code, VeilfedError

__all__ = ["LABEL", "Identity", "Role"]

# The name of an institution or of a party: one label of a DNS name, in lower case.
LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_PATTERN = re.compile(
    rf"spiffe://(?P<federation>{LABEL}(?:\.{LABEL})*)/(?P<role>[a-z]+)/(?P<institution>{LABEL})/(?P<name>{LABEL})"
)


class Role(StrEnum):
    """What a party may do. `enrollment` is the certificate authority's own server."""

    ORACLE = "oracle"
    AGGREGATOR = "aggregator"
    AGENT = "agent"
    ADMIN = "admin"
    ENROLLMENT = "enrollment"


SERVER_ROLES = frozenset({Role.ORACLE, Role.AGGREGATOR, Role.ENROLLMENT})


@dataclass(frozen=True)
class Identity:
    """Who a party is. Federations are DNS names; institutions and names are DNS labels."""

    federation: str
    role: Role
    institution: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises VeilfedError(IDENTITY_INVALID) when `text` is not such an identity."""
        match = _PATTERN.fullmatch(text)
        if match is None or match["role"] not in set(Role) or len(text) > 512:
            raise VeilfedError(
                Code.IDENTITY_INVALID,
                "expected an identity spiffe://<federation>/<role>/<institution>/<name>",
            )
        return cls(match["federation"], Role(match["role"]), match["institution"], match["name"])

    @property
    def is_server(self) -> bool:
        return self.role in SERVER_ROLES

    @property
    def server_name(self) -> str:
        """The DNS name that a server of this identity carries and that its clients demand."""
        if not self.is_server:
            raise VeilfedError(Code.IDENTITY_INVALID, f"{self} is not a server's identity")
        return f"{self.name}.{self.institution}.{self.role}.{self.federation}"

    def __str__(self) -> str:
        return f"spiffe://{self.federation}/{self.role}/{self.institution}/{self.name}"
