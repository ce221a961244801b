"""FEDOT and FEDOT(+B) at one institution (CVPR 2026): w_g is shared and averaged, X is private."""

from client_agent.trainers.orthogonal import PrivateTransform
from veilfed.jobs import FedotStrategy

__all__ = ["Fedot"]


class Fedot(PrivateTransform[FedotStrategy]):
    """With `transform: identity` it is plain averaging of the classifier."""
