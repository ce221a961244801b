"""Secure aggregation at the aggregator: see veilfed.secagg."""

from aggregator.secagg.sum import Phase, SecureSum

__all__ = ["Phase", "SecureSum"]
