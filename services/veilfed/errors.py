"""The catalogue of errors: one internal code -> gRPC status, public message, hint, exit code.

Everything that a party tells another, and everything that the command line prints, is a VeilfedError. Messages are
public: they name what was wrong and where, and never carry data, keys, tokens or file contents.
"""

from dataclasses import dataclass
from enum import Enum

import grpc

__all__ = ["Code", "VeilfedError"]


@dataclass(frozen=True)
class _Entry:
    status: grpc.StatusCode
    exit_code: int
    hint: str


class Code(Enum):
    """Names are stable: they cross the wire and are documented. Exit codes are stable too; 1 and 2 are the shell's."""

    # The caller's input.
    CONFIG_INVALID = _Entry(grpc.StatusCode.INVALID_ARGUMENT, 10, "Run `veilfed config check FILE`.")
    JOB_INVALID = _Entry(grpc.StatusCode.INVALID_ARGUMENT, 11, "Run `veilfed config check FILE` on the job.")
    INPUT_INVALID = _Entry(grpc.StatusCode.INVALID_ARGUMENT, 12, "Correct the named value.")
    DATA_INVALID = _Entry(grpc.StatusCode.INVALID_ARGUMENT, 13, "Check the data source in the configuration.")
    DATA_MISSING = _Entry(grpc.StatusCode.NOT_FOUND, 14, "Run `veilfed data fetch`.")
    MODEL_MISSING = _Entry(grpc.StatusCode.NOT_FOUND, 15, "Run `veilfed oracle fetch`.")
    DOWNLOAD_FAILED = _Entry(grpc.StatusCode.UNAVAILABLE, 16, "Check the network and the package registry settings.")
    FILE_UNUSABLE = _Entry(
        grpc.StatusCode.FAILED_PRECONDITION, 17, "Check that the path exists, its owner and the free space."
    )
    STATE_CORRUPT = _Entry(grpc.StatusCode.DATA_LOSS, 18, "Restore the file from a backup, or remove it to start anew.")
    PACKAGE_MISSING = _Entry(
        grpc.StatusCode.FAILED_PRECONDITION,
        19,
        "Install the party's extra: pip install 'veilfed[oracle]', 'veilfed[aggregator]', 'veilfed[agent]' or "
        "'veilfed[study]'.",
    )
    # Identity.
    TLS_REFUSED = _Entry(grpc.StatusCode.UNAVAILABLE, 20, "Check certificate, key and bundle with `veilfed pki show`.")
    UNAUTHENTICATED = _Entry(grpc.StatusCode.UNAUTHENTICATED, 21, "Present a certificate of the federation.")
    ROLE_DENIED = _Entry(grpc.StatusCode.PERMISSION_DENIED, 22, "Use an identity whose role may call this.")
    IDENTITY_MISMATCH = _Entry(grpc.StatusCode.PERMISSION_DENIED, 23, "Send your own identity.")
    TOKEN_INVALID = _Entry(grpc.StatusCode.PERMISSION_DENIED, 24, "Ask for a new token.")
    IDENTITY_INVALID = _Entry(grpc.StatusCode.INVALID_ARGUMENT, 25, "Check the certificate with `veilfed pki show`.")
    # The network.
    UNREACHABLE = _Entry(grpc.StatusCode.UNAVAILABLE, 30, "Check that the service runs and the address is right.")
    TIMEOUT = _Entry(grpc.StatusCode.DEADLINE_EXCEEDED, 31, "Try again, or raise the deadline.")
    PROTOCOL_VERSION = _Entry(grpc.StatusCode.FAILED_PRECONDITION, 32, "Upgrade the older party.")
    MESSAGE_TOO_LARGE = _Entry(grpc.StatusCode.RESOURCE_EXHAUSTED, 33, "Send smaller batches, or in chunks.")
    PROTOCOL_VIOLATION = _Entry(grpc.StatusCode.INVALID_ARGUMENT, 34, "Both parties should run the same version.")
    # The oracle.
    QUOTA_EXCEEDED = _Entry(grpc.StatusCode.RESOURCE_EXHAUSTED, 40, "Ask the model's owner for a larger quota.")
    RATE_LIMITED = _Entry(grpc.StatusCode.RESOURCE_EXHAUSTED, 41, "Slow down; the client retries by itself.")
    # Rounds.
    NOT_FOUND = _Entry(grpc.StatusCode.NOT_FOUND, 50, "List what exists with `veilfed job list`.")
    SESSION_INVALID = _Entry(grpc.StatusCode.FAILED_PRECONDITION, 51, "Join again.")
    SESSION_REPLACED = _Entry(
        grpc.StatusCode.FAILED_PRECONDITION, 59, "Let one process alone use an identity: stop the other one."
    )
    TASK_INVALID = _Entry(grpc.StatusCode.FAILED_PRECONDITION, 52, "Take the current task.")
    ROUND_CLOSED = _Entry(grpc.StatusCode.FAILED_PRECONDITION, 53, "Take the next round's task.")
    UPDATE_DUPLICATE = _Entry(grpc.StatusCode.ALREADY_EXISTS, 54, "Nothing to do: the first update stands.")
    UPDATE_INVALID = _Entry(grpc.StatusCode.INVALID_ARGUMENT, 55, "Check the institution's data and training.")
    ARTIFACT_INVALID = _Entry(grpc.StatusCode.INVALID_ARGUMENT, 56, "Upload the artifact again.")
    JOB_FAILED = _Entry(grpc.StatusCode.ABORTED, 57, "See `veilfed job show` for who was missing and why.")
    JOB_ENDED = _Entry(grpc.StatusCode.FAILED_PRECONDITION, 58, "Submit a new job.")
    JOB_RUNNING = _Entry(grpc.StatusCode.FAILED_PRECONDITION, 63, "Wait until the job has ended.")
    SINGULAR = _Entry(grpc.StatusCode.FAILED_PRECONDITION, 64, "Solve with a larger ridge or shrinkage.")
    # The institution's policy.
    POLICY_DENIED = _Entry(grpc.StatusCode.PERMISSION_DENIED, 60, "The institution's policy decides what leaves.")
    CONSENT_MISSING = _Entry(grpc.StatusCode.PERMISSION_DENIED, 61, "Approve the job with `veilfed agent approve`.")
    COHORT_INVALID = _Entry(
        grpc.StatusCode.FAILED_PRECONDITION,
        65,
        "Compare the rosters of the institutions; if they agree, somebody does not follow the protocol.",
    )
    LEDGER_BROKEN = _Entry(grpc.StatusCode.DATA_LOSS, 62, "The ledger was changed after it was written: investigate.")
    # The rest.
    CANCELLED = _Entry(grpc.StatusCode.CANCELLED, 70, "Start it again when wanted; finished work is kept.")
    INTERNAL = _Entry(grpc.StatusCode.INTERNAL, 99, "See the service's log.")

    @property
    def status(self) -> grpc.StatusCode:
        return self.value.status

    @property
    def exit_code(self) -> int:
        return self.value.exit_code

    @property
    def hint(self) -> str:
        return self.value.hint


class VeilfedError(Exception):
    """An error of the catalogue.

    `message` says what and where, in words that anyone may read; `hint` says what to do about it (by default the
    catalogue's). Raise it `from None` where the cause may hold something private.
    """

    def __init__(self, code: Code, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint or code.hint

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    def __reduce__(self) -> tuple[type["VeilfedError"], tuple[Code, str, str]]:
        return (VeilfedError, (self.code, self.message, self.hint))
