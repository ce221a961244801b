"""What each process of an institution begins with: its identity and its egress gate."""

from pathlib import Path

from client_agent.config import AgentConfig
from client_agent.egress import EgressGate
from client_agent.state import StateFolder
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import Credentials, load_credentials
from veilfed.identity.names import Role

__all__ = ["load_agent_credentials", "open_gate"]


def load_agent_credentials(config: AgentConfig) -> Credentials:
    """The agent's own. Raises VeilfedError(FILE_UNUSABLE or IDENTITY_INVALID)."""
    credentials = load_credentials(config.identity)
    if credentials.identity.role is not Role.AGENT:
        raise VeilfedError(Code.IDENTITY_INVALID, f"{credentials.identity} is not the identity of an agent")
    return credentials


def open_gate(config: AgentConfig, credentials: Credentials, ledger: Path) -> EgressGate:
    """The gate with the institution's policy. Raises VeilfedError(LEDGER_BROKEN or FILE_UNUSABLE)."""
    state = StateFolder(config.state)
    return EgressGate(
        config.policy,
        credentials.identity,
        ledger,
        config.aggregator.identity,
        credentials.bundle_pem,
        beside=[other for other in (state.ledger, state.predictions_ledger) if other != ledger],
    )
