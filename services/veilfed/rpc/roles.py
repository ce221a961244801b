"""Who may call what. An RPC that is not listed here is denied to all."""

from veilfed.identity.names import Role

__all__ = ["OPEN", "ROLES"]

_AGENT = frozenset({Role.AGENT})
_ADMIN = frozenset({Role.ADMIN})
_EVERYONE = frozenset(Role)

# Full method name -> roles that may call it.
ROLES: dict[str, frozenset[Role]] = {
    "/veilfed.v1.Oracle/Describe": _AGENT,
    "/veilfed.v1.Oracle/Embed": _AGENT,
    "/veilfed.v1.Oracle/PromptGradient": _AGENT,
    "/veilfed.v1.EncryptedBlocks/DescribeStudent": _AGENT,
    "/veilfed.v1.EncryptedBlocks/OpenSession": _AGENT,
    "/veilfed.v1.EncryptedBlocks/Forward": _AGENT,
    "/veilfed.v1.Coordinator/Join": _AGENT,
    "/veilfed.v1.Coordinator/Work": _AGENT,
    "/veilfed.v1.Coordinator/Stat": _AGENT,
    "/veilfed.v1.Coordinator/Push": _AGENT,
    "/veilfed.v1.Coordinator/Fetch": _AGENT | _ADMIN,
    "/veilfed.v1.JobService/SubmitJob": _ADMIN,
    "/veilfed.v1.JobService/ListJobs": _ADMIN,
    "/veilfed.v1.JobService/GetJob": _ADMIN,
    "/veilfed.v1.JobService/WatchJob": _ADMIN,
    "/veilfed.v1.JobService/CancelJob": _ADMIN,
    "/veilfed.v1.JobService/GetReport": _ADMIN,
    "/veilfed.v1.JobService/AddClient": _ADMIN,
    "/veilfed.v1.JobService/ForgetClient": _ADMIN,
    "/veilfed.v1.JobService/ResolveJob": _ADMIN,
    "/grpc.health.v1.Health/Check": _EVERYONE,
    "/grpc.health.v1.Health/Watch": _EVERYONE,
}

# What the enrolment service answers to callers that have no certificate yet. It is a process of its own; no other
# server lets anybody in without one.
OPEN = frozenset({"/veilfed.v1.Enrollment/Enroll", "/grpc.health.v1.Health/Check"})
