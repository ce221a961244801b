"""A gRPC call by hand over Python's own TLS: gRPC's clients cannot be held to TLS 1.2."""

import socket
import ssl

from veilfed.identity.material import TlsFiles

__all__ = ["call", "secured"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
SECONDS = 20


def secured(address: str, server_name: str, files: TlsFiles, version: ssl.TLSVersion) -> ssl.SSLSocket:
    """A connection with a client's certificate in exactly this version. Raises ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = version
    context.load_verify_locations(files.bundle)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    plain = socket.create_connection((host, int(port)), timeout=SECONDS)
    try:
        return context.wrap_socket(plain, server_hostname=server_name)
    except BaseException:
        plain.close()
        raise


def call(connection: ssl.SSLSocket, method: str) -> bytes:
    """Calls a unary method with an empty message; the header block that ends the answer, as it came."""
    headers = b"\x83\x87"  # POST, https
    headers += b"\x04" + _text(method) + b"\x01" + _text("test")  # path, authority
    headers += b"\x0f\x10" + _text("application/grpc") + b"\x00" + _text("te") + _text("trailers")
    connection.sendall(
        PREFACE
        + _frame(SETTINGS, 0, 0, b"")
        + _frame(HEADERS, END_HEADERS, 1, headers)
        + _frame(DATA, END_STREAM, 1, bytes(5))
    )
    while True:
        kind, flags, stream, payload = _received(connection)
        if stream == 1 and kind == HEADERS and flags & END_STREAM:
            return payload


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _received(connection: ssl.SSLSocket) -> tuple[int, int, int, bytes]:
    head = _exactly(connection, 9)
    return head[3], head[4], int.from_bytes(head[5:], "big"), _exactly(connection, int.from_bytes(head[:3], "big"))


def _exactly(connection: ssl.SSLSocket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the server ended the connection")
        data += more
    return data
