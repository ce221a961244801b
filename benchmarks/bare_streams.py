"""What grpc itself needs for connections: a server with mutual TLS and one echo stream, and clients of it.

    python -m benchmarks.bare_streams serve FOLDER
    python -m benchmarks.bare_streams FOLDER INSTITUTION[,INSTITUTION...] ADDRESS

Messages are as long as a classifier of 10 x 768. The clients say that they are ready after some messages each.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.memory import keep_memory
from veilfed.rpc.channel import open_channel
from veilfed.rpc.server import say_ready

METHOD = "/bare/Echo"
MESSAGE = bytes(10 * 768 * 4)
WARM_UP = 20


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs alone
    """Sends every message back."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request

        return grpc.stream_stream_rpc_method_handler(echo)


async def serve(folder: Path) -> None:
    credentials = load_credentials(TlsFiles.in_folder(folder / "aggregator"))
    server = grpc.aio.server(handlers=[Echo()])
    pair = (credentials.key_pem, credentials.certificate_pem)
    secured = grpc.ssl_server_credentials([pair], credentials.bundle_pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", secured)
    await server.start()
    say_ready("bare", port)
    await server.wait_for_termination()


async def client(folder: Path, institution: str, address: str, warm: Any) -> None:
    credentials = load_credentials(TlsFiles.in_folder(folder / institution))
    aggregator = Identity(credentials.identity.federation, Role.AGGREGATOR, "coordinator", "aggregator")
    async with open_channel(credentials, address, aggregator) as channel:
        made: Any = channel  # its stubs demand what grpc does not
        stream = made.stream_stream(METHOD)()
        for _ in range(WARM_UP):
            await stream.write(MESSAGE)
            await stream.read()
        await warm.wait()
        while True:
            await asyncio.sleep(1.0)
            await stream.write(MESSAGE)
            await stream.read()


async def clients(folder: Path, institutions: list[str], address: str) -> None:
    warm = asyncio.Barrier(len(institutions) + 1)
    running = [asyncio.create_task(client(folder, name, address, warm)) for name in institutions]
    await warm.wait()
    say_ready("bare clients")
    await asyncio.gather(*running)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        keep_memory()
        asyncio.run(serve(Path(sys.argv[2])))
    else:
        asyncio.run(clients(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]))
