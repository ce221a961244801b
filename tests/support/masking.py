"""Masked rounds in one process: institutions with real certificates, and a driver in place of a network."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import Message

from aggregator.secagg import SecureSum
from client_agent.secagg import Participant
from veilfed.identity.certificates import certificate_pem, key_pem, make_key, make_root, sign
from veilfed.identity.material import Credentials
from veilfed.identity.names import Identity, Role
from veilfed.secagg import Context, Format, Words

__all__ = ["FEDERATION", "Member", "Room", "credentials_of", "names", "roots"]

FEDERATION = "example.veilfed"
NOW = datetime.now(UTC)
Sent = TypeVar("Sent", bound=Message)


def names(count: int) -> list[str]:
    return [f"bank-{number:04}" for number in range(count)]


@lru_cache
def _authority(name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = make_key()
    return make_root(key, name, timedelta(days=30)), key


@lru_cache(maxsize=2000)
def credentials_of(
    institution: str,
    name: str = "agent",
    role: Role = Role.AGENT,
    federation: str = FEDERATION,
    ca: str = "ca",
    until: timedelta = timedelta(days=1),
) -> Credentials:
    """Of a new key, signed by the federation's root or by another that calls itself so; valid from 5 minutes ago on."""
    root, root_key = _authority(ca)
    identity, key = Identity(federation, role, institution, name), make_key()
    leaf = sign(root, root_key, identity, key.public_key(), NOW - timedelta(minutes=5), NOW + until)
    return Credentials(identity, certificate_pem(leaf), key_pem(key), roots())


def roots() -> bytes:
    return certificate_pem(_authority("ca")[0])


@dataclass
class Member:
    """One institution, with the disk that its secrets are kept on."""

    name: str
    context: Context
    allowed: Collection[str]
    least: int
    disk: list[bytes] = field(default_factory=list)

    def begin(self) -> Participant:
        """From what is on the disk, as after each restart."""
        return Participant.begin(
            self.context,
            credentials_of(self.name),
            allowed=self.allowed,
            least=self.least,
            keep=self.disk.append,
            kept=self.disk[-1] if self.disk else None,
        )


class Room:
    """An attempt at a round, driven phase by phase. `restarts`: those who start anew before each answer."""

    def __init__(
        self,
        members: Sequence[str],
        vectors: dict[str, Words],
        form: Format,
        least: int = 3,
        restarts: Collection[str] = (),
        attempt: int = 0,
    ) -> None:
        self.context = Context("job-1", 0, attempt, "0" * 64, form)
        self.server = SecureSum(self.context, members, least, FEDERATION, roots())
        self.members = {name: Member(name, self.context, members, least) for name in members}
        self.clients = {name: member.begin() for name, member in self.members.items()}
        self.vectors, self.restarts = vectors, restarts
        self.total = form.zeros()
        self.uploads: dict[str, int] = {}

    def client(self, name: str) -> Participant:
        if name in self.restarts:
            self.clients[name] = self.members[name].begin()
        return self.clients[name]

    def carried(self, name: str, message: Sent) -> Sent:
        """The message as it arrives, counted."""
        data = message.SerializeToString()
        self.uploads[name] = self.uploads.get(name, 0) + len(data)
        return type(message).FromString(data)

    def _answering(self, silent: Collection[str]) -> list[str]:
        return sorted(self.server.asked - set(silent))

    def advertise(self, silent: Collection[str] = ()) -> None:
        for name in self._answering(silent):
            self.server.take(name, self.carried(name, self.client(name).advertise()))
        self.server.advance()

    def share(self, silent: Collection[str] = ()) -> None:
        for name in self._answering(silent):
            request = self.server.request(name)
            self.server.take(name, self.carried(name, self.client(name).share(request)))  # type: ignore[arg-type]
        self.server.advance()

    def mask(self, silent: Collection[str] = ()) -> None:
        form = self.context.form
        for name in self._answering(silent):
            request = self.server.request(name)
            masked = form.to_bytes(self.client(name).mask(request, self.vectors[name]))  # type: ignore[arg-type]
            self.uploads[name] += len(masked)
            form.add(self.total, form.from_bytes(masked))
            self.server.take_masked(name)
        self.server.advance()

    def confirm(self, silent: Collection[str] = ()) -> None:
        for name in self._answering(silent):
            request = self.server.request(name)
            self.server.take(name, self.carried(name, self.client(name).confirm(request)))  # type: ignore[arg-type]
        self.server.advance()

    def reveal(self, silent: Collection[str] = ()) -> None:
        for name in self._answering(silent):
            request = self.server.request(name)
            self.server.take(name, self.carried(name, self.client(name).reveal(request)))  # type: ignore[arg-type]

    def run(self, silent: Sequence[Collection[str]] = ((),) * 5) -> Words:
        """The sum; `silent` are those who do not answer in each phase (and, but for the first, later)."""
        steps = (self.advertise, self.share, self.mask, self.confirm, self.reveal)
        for step, quiet in zip(steps, silent, strict=True):
            step(quiet)
        self.server.unmask(self.total)
        return self.total
