"""The peer of benchmarks.transport: Flower's long-lived gRPC transport on the same job, without TLS.

    python flower_transport.py CLIENTS CLASSES DIMENSION ROUNDS PORT

Runs in an environment of its own with flwr==1.28.0 (later releases move this transport to HTTP). Clients average a
float32 [CLASSES, DIMENSION] array. Prints one JSON line.
"""

import json
import logging
import multiprocessing
import os
import resource
import sys
import time

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")

import flwr
import numpy as np

logging.getLogger("flwr").setLevel(logging.ERROR)


class Averaging(flwr.client.NumPyClient):
    """Sends back what it got, moved a little."""

    def __init__(self, step: np.ndarray) -> None:
        self.step = step

    def get_parameters(self, config: dict) -> list[np.ndarray]:
        return [self.step]

    def fit(self, parameters: list[np.ndarray], config: dict) -> tuple[list[np.ndarray], int, dict]:
        return [parameters[0] + self.step], 100, {}

    def evaluate(self, parameters: list[np.ndarray], config: dict) -> tuple[float, int, dict]:
        return 0.0, 1, {}


class TimedAverage(flwr.server.strategy.FedAvg):
    """Notes when each round has been aggregated."""

    def __init__(self, clients: int, initial: np.ndarray) -> None:
        super().__init__(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=clients,
            min_available_clients=clients,
            initial_parameters=flwr.common.ndarrays_to_parameters([initial]),
        )
        self.ends: list[float] = []

    def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple:
        aggregated = super().aggregate_fit(server_round, results, failures)
        self.ends.append(time.monotonic())
        return aggregated


def run_client(address: str, shape: tuple[int, int], seed: int) -> None:
    step = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(0.01)
    flwr.client.start_client(server_address=address, client=Averaging(step).to_client())


def main(clients: int, classes: int, dimension: int, rounds: int, port: int) -> None:
    address, shape = f"127.0.0.1:{port}", (classes, dimension)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=run_client, args=(address, shape, seed)) for seed in range(clients)]
    for worker in workers:
        worker.start()
    strategy = TimedAverage(clients, np.zeros(shape, np.float32))
    flwr.server.start_server(
        server_address=address, config=flwr.server.ServerConfig(num_rounds=rounds), strategy=strategy
    )
    seconds = strategy.ends[-1] - strategy.ends[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"rounds_per_s": (len(strategy.ends) - 1) / seconds, "rss_mb": peak / 1e6}) + "\n")
    for worker in workers:
        worker.join(15)
        if worker.is_alive():
            worker.terminate()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:6]))
