"""What leaves an institution: the policy, the gate that enforces it, and the ledger that it writes."""

from client_agent.egress.gate import EgressGate
from client_agent.egress.policy import EgressPolicy, Purpose

__all__ = ["EgressGate", "EgressPolicy", "Purpose"]
