"""The demonstration: all parties as processes on this machine, a whole study over the real services."""
