"""Secure aggregation at an institution: see veilfed.secagg."""

from client_agent.secagg.participant import Participant

__all__ = ["Participant"]
