"""FEDOT and FEDOT(+B) at one institution (CVPR 2026): w_g is shared and averaged, X is private."""

from collections.abc import Mapping

from client_agent.trainers.orthogonal import Orthogonal
from veilfed.jobs import CLASSIFIER, TRANSFORM, FedotStrategy, Shapes

__all__ = ["Fedot"]


class Fedot(Orthogonal[FedotStrategy]):
    """With `transform: identity` there is no X: plain averaging of the classifier."""

    @property
    def rates(self) -> Mapping[str, float]:
        rates = super().rates
        return rates if self.private_shapes else {CLASSIFIER: rates[CLASSIFIER]}

    @property
    def private_shapes(self) -> Shapes:
        return {TRANSFORM: self.strategy.transform_shape} if self.strategy.transform == "orthogonal" else {}
