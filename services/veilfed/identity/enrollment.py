"""The enrolment service and its client: a certificate in exchange for a one-time token."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import grpc

from veilfed.errors import Code, VeilfedError
from veilfed.identity import certificates
from veilfed.identity.authority import KEY_EXISTS_HINT, CertificateAuthority, write_identity
from veilfed.identity.material import Credentials
from veilfed.identity.names import Identity
from veilfed.identity.tokens import Token
from veilfed.logs import get_logger
from veilfed.rpc.channel import translated
from veilfed.rpc.server import create_server, run_server
from veilfed.v1.enrollment_pb2 import EnrollRequest, EnrollResponse
from veilfed.v1.enrollment_pb2_grpc import (
    EnrollmentServicer,
    EnrollmentStub,
    add_EnrollmentServicer_to_server,
)

__all__ = ["enroll", "serve"]

log = get_logger("pki.enrollment")

# The service makes its own certificate anew at each start, with a fresh key that never touches the disk.
SERVER_LIFETIME = timedelta(days=365)
MAX_REQUEST_BYTES = 64 * 1024
ENROLL_SECONDS = 30.0


class EnrollmentService(EnrollmentServicer):
    """Signs requests of those who hold a token."""

    def __init__(self, authority: CertificateAuthority) -> None:
        self._authority = authority

    async def Enroll(  # noqa: N802  the name of the RPC
        self, request: EnrollRequest, context: grpc.aio.ServicerContext[EnrollRequest, EnrollResponse]
    ) -> EnrollResponse:
        certificate = await asyncio.to_thread(self._authority.redeem, request.token, request.request_pem)
        log.info("enrolled", identity=str(certificates.identity_of(certificates.load_certificates(certificate, "")[0])))
        return EnrollResponse(certificate_pem=certificate, bundle_pem=self._authority.root_pem)


def _credentials(authority: CertificateAuthority, endpoints: Sequence[str]) -> Credentials:
    key = certificates.make_key()
    certificate = authority.sign(authority.enrollment, key.public_key(), endpoints, SERVER_LIFETIME)
    return Credentials(authority.enrollment, certificate, certificates.key_pem(key), authority.root_pem)


async def serve(authority: CertificateAuthority, listen: str) -> None:
    """Serves enrolment until SIGTERM. Callers need no certificate: they have none yet."""
    server, port = create_server(
        _credentials(authority, ()), listen, require_client=False, max_message_bytes=MAX_REQUEST_BYTES
    )
    add_EnrollmentServicer_to_server(EnrollmentService(authority), server)
    await run_server(server, port, name="pki")


async def _redeem(token: Token, request_pem: bytes) -> EnrollResponse:
    secure = grpc.ssl_channel_credentials(root_certificates=token.root_pem.encode())
    options = [("grpc.ssl_target_name_override", token.server.server_name), ("grpc.enable_http_proxy", 0)]
    with translated(None, token.address):
        async with grpc.aio.secure_channel(token.address, secure, options=options) as channel:
            stub = EnrollmentStub(channel)
            return await stub.Enroll(EnrollRequest(token=token.secret, request_pem=request_pem), timeout=ENROLL_SECONDS)


async def enroll(token: Token, folder: Path, endpoints: Sequence[str] = (), *, replace: bool = False) -> Identity:
    """Makes a key in `folder`, has it signed, and leaves certificate.pem, key.pem (0600) and bundle.pem there.

    Nothing is written unless the answer is right; what is there stays unless `replace` is given. Raises VeilfedError:
    TOKEN_INVALID, UNREACHABLE, TLS_REFUSED, FILE_UNUSABLE, IDENTITY_INVALID, INPUT_INVALID.
    """
    if not replace and (folder / "key.pem").exists():  # before the token is spent
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder / 'key.pem'} exists already", KEY_EXISTS_HINT)
    key = certificates.make_key()
    response = await _redeem(token, certificates.make_request(key, token.identity, endpoints))
    leaf = certificates.load_certificates(response.certificate_pem, "the answer")[0]
    if certificates.identity_of(leaf) != token.identity or leaf.public_key() != key.public_key():
        raise VeilfedError(Code.IDENTITY_INVALID, "the answer is not the certificate that was asked for")
    if response.bundle_pem != token.root_pem.encode():
        raise VeilfedError(Code.IDENTITY_INVALID, "the answer's root is not the token's")
    write = partial(write_identity, replace=replace)
    await asyncio.to_thread(write, folder, response.certificate_pem, certificates.key_pem(key), response.bundle_pem)
    return token.identity
