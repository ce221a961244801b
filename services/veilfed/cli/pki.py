"""`veilfed pki`: certificate authorities, one-time tokens, enrolment."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from veilfed import logs
from veilfed.cli import output
from veilfed.errors import Code, VeilfedError
from veilfed.identity import enrollment
from veilfed.identity.authority import CertificateAuthority, make_identity_files
from veilfed.identity.certificates import UNREADABLE, identity_of, load_certificates
from veilfed.identity.explain import faults
from veilfed.identity.material import TlsFiles, load_credentials, read_file
from veilfed.identity.names import Identity
from veilfed.identity.tokens import Token, fingerprint

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Identities: authorities, tokens, enrolment.")

Dir = Annotated[Path, typer.Option("--dir", help="Folder of the certificate authority.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for certificate.pem, key.pem and bundle.pem.")]
Id = Annotated[str, typer.Option("--id", help="spiffe://<federation>/<role>/<institution>/<name>")]
Endpoints = Annotated[
    list[str] | None, typer.Option("--endpoint", help="IP address or DNS name of a server; may be given again.")
]

Replace = Annotated[bool, typer.Option("--replace", help="Replace the key and certificate that are there.")]

USAGES = {ExtendedKeyUsageOID.SERVER_AUTH: "server", ExtendedKeyUsageOID.CLIENT_AUTH: "client"}


@app.command()
def init(
    directory: Dir,
    federation: Annotated[str, typer.Option(help="A DNS name, such as trial.example.org.")],
    zone: Annotated[str | None, typer.Option(help="Make the root of this institution's own zone.")] = None,
    as_json: output.Json = False,
) -> None:
    """Makes a certificate authority: the federation's, or with --zone an institution's for its own oracle."""
    made = CertificateAuthority.create(directory, federation, zone)
    shown = fingerprint(made.root.public_bytes(Encoding.DER))
    output.result(
        {"federation": federation, "zone": zone, "root": str(directory / "root.pem"), "fingerprint": shown},
        f"{directory / 'root.pem'}: root of {zone or federation}\nfingerprint {shown}",
        as_json,
    )


@app.command()
def serve(
    directory: Dir,
    listen: Annotated[str, typer.Option(help="Address and port; port 0 takes a free one.")] = "127.0.0.1:8440",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
) -> None:
    """Serves enrolment until SIGTERM: certificates in exchange for one-time tokens."""
    logs.configure(log_level)
    asyncio.run(enrollment.serve(CertificateAuthority.open(directory), listen))


@app.command()
def token(
    directory: Dir,
    identity: Id,
    address: Annotated[str, typer.Option(help="Where `veilfed pki serve` listens, as the newcomer sees it.")],
    hours: Annotated[float, typer.Option(min=0.001, max=24 * 90, help="Lifetime.")] = 24.0,
    as_json: output.Json = False,
) -> None:
    """Makes a token that gives one identity its certificate, once. Print it to a safe place: it is a secret."""
    authority = CertificateAuthority.open(directory)
    made = authority.new_token(Identity.parse(identity), address, timedelta(hours=hours))
    output.result({"identity": identity, "token": made.text(), "hours": hours}, made.text(), as_json)


def _token_text(token_text: str | None, token_file: Path | None) -> str:
    if token_text is not None and token_file is None:
        return token_text
    if token_file is not None and token_text is None:
        return read_file(token_file).decode("utf-8", "replace")
    raise VeilfedError(Code.INPUT_INVALID, "give either --token or --token-file")


@app.command()
def enroll(
    out: Out,
    token: Annotated[str | None, typer.Option(help="The token; visible to others on this machine.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token.")] = None,
    endpoint: Endpoints = None,
    replace: Replace = False,
    as_json: output.Json = False,
) -> None:
    """Makes a key here and gets it a certificate. The key never leaves this machine."""
    parsed = Token.parse(_token_text(token, token_file))
    identity = asyncio.run(enrollment.enroll(parsed, out, endpoint or (), replace=replace))
    output.result({"identity": str(identity), "folder": str(out)}, f"{identity} is in {out}", as_json)


@app.command()
def issue(
    directory: Dir,
    identity: Id,
    out: Out,
    bundle: Annotated[Path | None, typer.Option(help="Roots that the party trusts; by default this one.")] = None,
    endpoint: Endpoints = None,
    days: Annotated[float, typer.Option(min=0.001, max=3650, help="Lifetime.")] = 30.0,
    replace: Replace = False,
    as_json: output.Json = False,
) -> None:
    """Makes key and certificate at once, where the authority and the party share a machine."""
    parsed = Identity.parse(identity)
    make_identity_files(
        CertificateAuthority.open(directory),
        parsed,
        out,
        bundle=None if bundle is None else read_file(bundle),
        endpoints=endpoint or (),
        lifetime=timedelta(days=days),
        replace=replace,
    )
    output.result({"identity": str(parsed), "folder": str(out)}, f"{parsed} is in {out}", as_json)


def _state(certificate: x509.Certificate) -> str:
    now = datetime.now(UTC)
    if now < certificate.not_valid_before_utc:
        return "not yet valid"
    return "valid" if now <= certificate.not_valid_after_utc else "expired"


def _problems(folder: Path) -> list[str]:
    """What is wrong with the identity in a folder, as its owner can tell."""
    try:
        return faults(load_credentials(TlsFiles.in_folder(folder)))
    except VeilfedError as error:
        return [error.message]


def _describe(path: Path, certificate: x509.Certificate) -> dict[str, Any]:
    try:
        identity: str | None = str(identity_of(certificate))
    except VeilfedError:
        identity = None
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        listed = [USAGES.get(usage, usage.dotted_string) for usage in usages]
        endpoints = [
            *names.get_values_for_type(x509.DNSName),
            *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
        ]
    except UNREADABLE:
        listed, endpoints = [], []
    return {
        "file": str(path),
        "identity": identity,
        "subject": certificate.subject.rfc4514_string(),
        "issuer": certificate.issuer.rfc4514_string(),
        "not_before": certificate.not_valid_before_utc.isoformat(),
        "not_after": certificate.not_valid_after_utc.isoformat(),
        "state": _state(certificate),
        "usages": listed,
        "endpoints": endpoints,
        "fingerprint": fingerprint(certificate.public_bytes(Encoding.DER)),
    }


def _words(value: str | list[str] | None) -> str:
    return (", ".join(value) if isinstance(value, list) else value) or "none"


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A certificate, a bundle, or a folder with such files.")],
    as_json: output.Json = False,
) -> None:
    """Shows certificates: identity, dates, uses, fingerprint, and what is wrong with them. Never a key."""
    named = ("certificate.pem", "bundle.pem", "root.pem")
    files = [path / name for name in named if (path / name).is_file()] if path.is_dir() else [path]
    if not files:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: holds no {', '.join(named)}")
    found = [
        _describe(file, certificate) for file in files for certificate in load_certificates(read_file(file), str(file))
    ]
    if (path / "key.pem").is_file():
        found[0]["problems"] = _problems(path)
    text = "\n\n".join("\n".join(f"{key:12} {_words(value)}" for key, value in one.items()) for one in found)
    output.result(found, text, as_json)
