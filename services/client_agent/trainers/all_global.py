"""FEDOT with everything shared ("all global" in the paper's comparison): X is averaged like the classifier."""

from client_agent.trainers.orthogonal import Orthogonal
from veilfed.jobs import AllGlobalStrategy

__all__ = ["AllGlobal"]


class AllGlobal(Orthogonal[AllGlobalStrategy]):
    """Nothing is private: X comes with the model, for newcomers too."""
