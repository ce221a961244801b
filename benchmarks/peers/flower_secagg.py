"""The peer of benchmarks.secagg: one round of Flower's SecAgg+, all parties in one process.

    python flower_secagg.py CLIENTS SHAPE SHARES

Runs in an environment of its own with flwr==1.28.0. The server is Flower's own SecAggPlusWorkflow and each client its
own secaggplus_mod; between them is a loop in place of a network, which counts the bytes of the replies as the protobuf
messages that they travel in. Quantisation: 20 bits on [-8, 8], so that a thousand of them fit the modulus 2^32.
Prints one JSON line; seconds are of the processor, of all parties together.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from flwr.client.mod.secure_aggregation.secaggplus_mod import secaggplus_mod
from flwr.common import (
    Code,
    ConfigRecord,
    Context,
    FitIns,
    FitRes,
    Message,
    RecordDict,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common import recorddict_compat as compat
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow
from secagg_vectors import vector

logging.getLogger("flwr").setLevel(logging.ERROR)


class Proxy:
    """What the workflow asks of a client: its number."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


class Loop:
    """In place of the grid: hands each message to the client's mod."""

    def __init__(self, shape: str, clients: int) -> None:
        self.shape = shape
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
            for node in range(1, clients + 1)
        }
        self.uploads = dict.fromkeys(self.contexts, 0)
        self.spent = 0.0

    def send_and_receive(self, messages: list, timeout: float | None = None) -> list:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.content, _ = self.carried(message.content)
            reply = secaggplus_mod(message, self.contexts[node], self.fit)
            reply.content, size = self.carried(reply.content)
            self.uploads[node] += size
            replies.append(reply)
        return replies

    def carried(self, content: RecordDict) -> tuple[RecordDict, int]:
        """What arrives of it, and its bytes; the time that this takes is not the protocol's."""
        started = time.process_time()
        proto = recorddict_to_proto(content)
        copy = recorddict_from_proto(proto)
        self.spent += time.process_time() - started
        return copy, proto.ByteSize()

    def fit(self, message: Message, context: Context) -> Message:
        """What the client trained: its vector."""
        started = time.process_time()
        parameters = ndarrays_to_parameters([vector(self.shape, context.node_id)])
        result = FitRes(Status(Code.OK, ""), parameters, 1, {})
        content = compat.fitres_to_recorddict(result, keep_input=False)
        self.spent += time.process_time() - started
        return Message(content, reply_to=message)


class Kept(FedAvg):
    """Selects everybody, and keeps the mean."""

    def __init__(self, clients: int, parameters: object) -> None:
        super().__init__()
        self.clients, self.parameters = clients, parameters
        self.mean = np.empty(0)

    def configure_fit(self, server_round: int, parameters: object, client_manager: object) -> list:
        return [(Proxy(node), FitIns(self.parameters, {})) for node in range(1, self.clients + 1)]

    def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple:
        assert len(results) == self.clients
        assert not failures
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


def main() -> None:
    clients, shape, shares = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    nothing = ndarrays_to_parameters([np.zeros(1)])
    strategy = Kept(clients, nothing)
    state = RecordDict()
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(nothing, keep_input=True)
    context = LegacyContext(Context(run_id=1, node_id=0, node_config={}, state=state, run_config={}), strategy=strategy)
    workflow = SecAggPlusWorkflow(
        num_shares=shares,
        reconstruction_threshold=2 * shares // 3 + 1,
        max_weight=1.0,
        clipping_range=8.0,
        quantization_range=2**20,
        modulus_range=2**32,
    )
    loop = Loop(shape, clients)
    started = time.process_time()
    workflow(loop, context)
    seconds = time.process_time() - started - loop.spent
    mean = sum(vector(shape, node) for node in range(1, clients + 1)) / clients
    print(
        json.dumps(
            {
                "seconds": seconds,
                "upload_bytes": max(loop.uploads.values()),
                "largest_error": float(np.abs(strategy.mean - mean).max()),
            }
        )
    )


if __name__ == "__main__":
    main()
