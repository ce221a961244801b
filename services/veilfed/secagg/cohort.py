"""What all members of one attempt at a round must agree on: the round, who takes part with which keys, who survived.

Whatever is signed or derived is bound to it, so that messages of one attempt are of no use in another.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import UNREADABLE, identity_of
from veilfed.identity.names import Identity, Role
from veilfed.identity.trust import certificates, trusted
from veilfed.secagg.masks import KEY_BYTES
from veilfed.secagg.vectors import Format
from veilfed.v1.secagg_pb2 import Advertisement, MaskingCohort

__all__ = [
    "MAX_HOLDERS",
    "Cohort",
    "Context",
    "Member",
    "advertisement_statement",
    "holders_of",
    "last_valid",
    "survivors_statement",
    "threshold",
    "verified",
]

# Holders that a member of a large cohort chooses at random for the shares of its secrets; pairwise masks are between
# those of whom one has chosen the other. With at most 10,000 members, fewer than a third of whom collude, the
# probability that anybody chooses as many of these as the threshold says is below 2^-40 (Bell et al. 2020, section 3).
MAX_HOLDERS = 144

MAX_CERTIFICATE_BYTES = 16 * 1024


def threshold(count: int) -> int:
    """t > 2/3 of so many: two groups of t have more than a third of all in common (Bonawitz et al. 2017, 6.2)."""
    return 2 * count // 3 + 1


def holders_of(members: int) -> int:
    """How many others each member chooses as holders, besides itself."""
    return min(members - 1, MAX_HOLDERS)


@dataclass(frozen=True)
class Context:
    """One attempt at one round of a job, as its specification says."""

    job_id: str
    round: int
    attempt: int
    # Of the specification that the institutions have consented to.
    spec_sha256: str
    form: Format

    @property
    def digest(self) -> bytes:
        numbers = (self.round, self.attempt, self.form.narrow, self.form.wide)
        return _hashed("context", self.job_id.encode(), self.spec_sha256.encode(), *(str(n).encode() for n in numbers))


def _hashed(purpose: str, *parts: bytes) -> bytes:
    """SHA-256 of parts, each with its length before it."""
    found = hashlib.sha256(f"veilfed secagg 1 {purpose}\n".encode())
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def advertisement_statement(context: Context, identity: str, mask_key: bytes, seal_key: bytes) -> bytes:
    """What the signature of an advertisement is over."""
    return _hashed("advertisement", context.digest, identity.encode(), mask_key, seal_key)


def survivors_statement(cohort: "Cohort", sharers: Sequence[int], survivors: Sequence[int]) -> bytes:
    """What a confirmation is a signature over: who shared, and whose masked values arrived."""
    return _hashed("survivors", cohort.digest, _numbers(sharers), _numbers(survivors))


def _numbers(members: Sequence[int]) -> bytes:
    return ",".join(map(str, members)).encode()


@dataclass(frozen=True)
class Member:
    """A member whose advertisement was verified."""

    identity: Identity
    signing_key: ec.EllipticCurvePublicKey
    mask_key: bytes
    seal_key: bytes

    def verify(self, statement: bytes, signature: bytes) -> None:
        """Raises VeilfedError(COHORT_INVALID) unless the member signed the statement."""
        try:
            self.signing_key.verify(signature, statement, ec.ECDSA(SHA256()))
        except InvalidSignature:
            raise _refuse(f"the signature of {self.identity.institution} is not over what was said") from None


def verified(
    context: Context, advertisement: Advertisement, federation: str, bundle_pem: bytes, at: datetime | None = None
) -> Member:
    """The member that an advertisement is of.

    Its certificate is an agent's of the federation, valid now (or `at`) under the trusted roots, and has signed its
    keys for this attempt. Raises VeilfedError(COHORT_INVALID).
    """
    identity, key = _signer(advertisement.certificate_pem, bundle_pem, at or datetime.now(UTC))
    if identity.role is not Role.AGENT or identity.federation != federation:
        raise _refuse(f"{identity} is not an agent of {federation}")
    keys = advertisement.mask_key, advertisement.seal_key
    if any(len(key) != KEY_BYTES for key in keys) or keys[0] == keys[1]:
        raise _refuse(f"the keys of {identity.institution} are not two keys of {KEY_BYTES} bytes")
    member = Member(identity, key, *keys)
    member.verify(advertisement_statement(context, str(identity), *keys), advertisement.signature)
    return member


def last_valid(advertisements: Iterable[Advertisement]) -> datetime:
    """Now, or the end of the first of their certificates if that is past.

    For advertisements that were verified before, and are read again from where they were kept: all were valid then, and
    so they are at that moment. A certificate that has ended meanwhile must not end a round that nobody can run again.
    """
    kept = [one for advertisement in advertisements for one in certificates(advertisement.certificate_pem)]
    return min([datetime.now(UTC), *(one.not_valid_after_utc for one in kept)])


def _signer(pem: bytes, bundle_pem: bytes, at: datetime) -> tuple[Identity, ec.EllipticCurvePublicKey]:
    chain = certificates(pem) if len(pem) <= MAX_CERTIFICATE_BYTES else ()
    try:
        if chain and trusted(chain, certificates(bundle_pem), at):
            return _named(chain[0])
    except UNREADABLE:
        pass
    raise _refuse("a member's certificate cannot be read, or is not valid under the federation's roots")


@lru_cache(maxsize=1024)  # the same certificates come in every round
def _named(leaf: x509.Certificate) -> tuple[Identity, ec.EllipticCurvePublicKey]:
    """Whom a trusted certificate names, and its key."""
    key = leaf.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise _refuse("a member's certificate has no key that signs")
    try:
        return identity_of(leaf), key
    except VeilfedError as error:
        raise _refuse(f"a member's certificate: {error.message}") from None


class Cohort:
    """Who takes part in an attempt, sorted by institution; members are numbers from 0 in it."""

    def __init__(self, context: Context, message: MaskingCohort, members: Sequence[Member]) -> None:
        self.context = context
        self.members = members
        self._numbers = {member.identity.institution: number for number, member in enumerate(members)}
        self.digest = _hashed("cohort", context.digest, message.SerializeToString(deterministic=True))

    @classmethod
    def read(
        cls,
        context: Context,
        message: MaskingCohort,
        allowed: Collection[str],
        least: int,
        federation: str,
        bundle_pem: bytes,
        at: datetime | None = None,
    ) -> "Cohort":
        """Of `allowed` institutions only, each once, and at least `least`. Raises VeilfedError(COHORT_INVALID)."""
        if len(message.advertisements) < least:
            raise _refuse(f"{len(message.advertisements)} institutions take part; at least {least} must")
        if len(message.advertisements) > len(allowed):
            raise _refuse(f"{len(message.advertisements)} members; {len(allowed)} institutions may take part")
        members = [verified(context, one, federation, bundle_pem, at) for one in message.advertisements]
        names = [member.identity.institution for member in members]
        if strangers := sorted(set(names) - set(allowed)):
            raise _refuse(f"{strangers[0]} is not an institution that may take part")
        if names != sorted(set(names)):
            raise _refuse("the members are not sorted, or an institution is there twice")
        if len({key for member in members for key in (member.mask_key, member.seal_key)}) != 2 * len(members):
            raise _refuse("two members have the same key")
        return cls(context, message, members)

    @property
    def threshold(self) -> int:
        """Members without which there is no sum."""
        return threshold(len(self.members))

    def number(self, institution: str) -> int | None:
        """A member's number; None if it does not take part."""
        return self._numbers.get(institution)


def _refuse(message: str) -> VeilfedError:
    return VeilfedError(Code.COHORT_INVALID, message)
