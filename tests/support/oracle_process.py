"""The real oracle around a model that needs no weights, as a process of its own.

python -m tests.support.oracle_process CONFIG DIMENSION SECONDS: each pass of the model takes SECONDS.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fm_oracle.config import OracleConfig
from fm_oracle.server import service
from tests.support.agents import LetterModel
from veilfed import logs
from veilfed.config import load_config
from veilfed.identity.material import load_credentials
from veilfed.rpc.server import create_server, run_server
from veilfed.v1.oracle_pb2_grpc import add_OracleServicer_to_server


class SlowModel(LetterModel):
    """Takes its time for each pass, so that a fault finds it at work."""

    def __init__(self, dimension: int, seconds: float) -> None:
        super().__init__(dimension)
        self._seconds = seconds

    def forward(self, prepared: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        time.sleep(self._seconds)
        return super().forward(prepared)


async def main(path: Path, dimension: int, seconds: float) -> None:
    config = load_config(OracleConfig, path)
    logs.configure(config.log_level)
    async with service(SlowModel(dimension, seconds), config) as oracle:
        server, port = create_server(load_credentials(config.identity), config.listen)
        add_OracleServicer_to_server(oracle, server)
        await run_server(server, port, name="oracle")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
