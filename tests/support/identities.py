"""A federation's identities in a folder, made in process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from veilfed.identity.authority import LEAF_LIFETIME, CertificateAuthority, make_identity_files
from veilfed.identity.material import TlsFiles
from veilfed.identity.names import Identity, Role

__all__ = ["Federation", "make_federation"]


@dataclass
class Federation:
    """Certificates of all parties. Oracles have theirs from their institution's own zone root."""

    folder: Path
    name: str
    authority: CertificateAuthority
    agents: dict[str, TlsFiles] = field(default_factory=dict)
    oracles: dict[str, TlsFiles] = field(default_factory=dict)
    zone_roots: dict[str, Path] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.authority.folder / "root.pem"

    @property
    def aggregator(self) -> TlsFiles:
        return TlsFiles.in_folder(self.folder / "aggregator")

    @property
    def admin(self) -> TlsFiles:
        return TlsFiles.in_folder(self.folder / "admin")

    @property
    def aggregator_id(self) -> Identity:
        return Identity(self.name, Role.AGGREGATOR, "coordinator", "aggregator")

    def agent_id(self, institution: str, name: str = "agent") -> Identity:
        return Identity(self.name, Role.AGENT, institution, name)

    def oracle_id(self, institution: str) -> Identity:
        return Identity(self.name, Role.ORACLE, institution, "oracle")

    def make(
        self,
        identity: Identity,
        folder: Path,
        authority: CertificateAuthority | None = None,
        not_before: datetime | None = None,
        lifetime: timedelta = LEAF_LIFETIME,
    ) -> TlsFiles:
        """Any identity, signed by the federation's root unless another authority is given."""
        make_identity_files(
            authority or self.authority,
            identity,
            folder,
            bundle=self.authority.root_pem,
            lifetime=lifetime,
            not_before=not_before,
        )
        return TlsFiles.in_folder(folder)

    def add(self, institution: str) -> None:
        """An institution: its agent, its zone root, its oracle."""
        place = self.folder / institution
        zone = CertificateAuthority.create(place / "zone", self.name, institution)
        self.agents[institution] = self.make(self.agent_id(institution), place / "agent")
        self.oracles[institution] = self.make(self.oracle_id(institution), place / "oracle", zone)
        self.zone_roots[institution] = zone.folder / "root.pem"


def make_federation(folder: Path, institutions: Sequence[str], federation: str = "test.veilfed") -> Federation:
    """All identities of a federation: aggregator, admin, and an agent and an oracle per institution."""
    made = Federation(folder, federation, CertificateAuthority.create(folder / "ca", federation))
    made.make(made.aggregator_id, folder / "aggregator")
    made.make(Identity(federation, Role.ADMIN, "coordinator", "admin"), folder / "admin")
    for institution in institutions:
        made.add(institution)
    return made
