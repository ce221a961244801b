"""The typed allow-list: which messages may leave, to whom, with which fields, in which form.

What is not listed here does not leave. A new RPC or field of the protos is refused until someone lists it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from client_agent.egress.policy import ACTIVITIES, Purpose
from veilfed import protocol
from veilfed.errors import Code
from veilfed.identity.names import Role
from veilfed.v1.aggregator_pb2 import FetchRequest, JoinRequest, PushRequest, StatRequest, WorkRequest
from veilfed.v1.blocks_pb2 import DescribeStudentRequest, ForwardRequest, OpenSessionRequest
from veilfed.v1.oracle_pb2 import DescribeRequest, EmbedRequest, PromptGradientRequest

__all__ = ["BLOCKS", "COORDINATOR", "ORACLE", "RULES", "Refused", "Rule", "check_form", "find_rule", "role_for"]

COORDINATOR = "/veilfed.v1.Coordinator/"
ORACLE = "/veilfed.v1.Oracle/"
BLOCKS = "/veilfed.v1.EncryptedBlocks/"


class Refused(Exception):  # noqa: N818  an outcome, turned into VeilfedError(POLICY_DENIED) by the gate
    """Why a message may not leave; for people, nothing private."""


@dataclass(frozen=True)
class Rule:
    """One kind of message that may leave. `fields` are dotted paths, of messages and of plain values alike."""

    role: Role
    message: type[Message]
    purpose: Purpose
    fields: frozenset[str]


def _rule(role: Role, message: type[Message], purpose: Purpose, fields: str = "") -> Rule:
    return Rule(role, message, purpose, frozenset(fields.split()))


def _nested(path: str, fields: str) -> str:
    """A message in a field, and the fields of its own."""
    return " ".join([path, *(f"{path}.{name}" for name in fields.split())])


_TENSORS = (
    " update.tensors update.tensors.tensors update.tensors.tensors.name update.tensors.tensors.tensor"
    " update.tensors.tensors.tensor.dtype update.tensors.tensors.tensor.shape update.tensors.tensors.tensor.data"
)
_ARTIFACT = " update.artifact update.artifact.sha256 update.artifact.size"
_UPDATE = (
    "session update update.job_id update.round update.token update.weight update.evaluations"
    " update.evaluations.name update.evaluations.correct update.evaluations.total"
    " update.ledger_head update.ledger_head.records update.ledger_head.sha256"
)
_MASK = "session mask mask.job_id mask.round mask.attempt"
_MASK_PARTS = {
    "advertisement": "mask_key seal_key signature certificate_pem",
    "shares": "commitment shares shares.member shares.sealed",
    "confirmation": "signature",
    "reveal": "self_masks self_masks.member self_masks.share mask_keys mask_keys.member mask_keys.share",
}
_TEXTS = " texts texts.values"
_IMAGES = " images images.values"
_PROMPTS = " prompts prompts.dtype prompts.shape prompts.data"
_CIPHERTEXTS = "parameters count components limbs scale seed first residues sha256"
_PARTS = {
    "public_key": _CIPHERTEXTS,
    "digit": "parameters rotation digit residues sha256 seed",
    **dict.fromkeys(("features", "mask", "padding", "refreshed"), _CIPHERTEXTS),
}
_TASK = "head head.dtype head.shape head.data labels"

# By full method name and by the set member of the message's oneof ("" where it has none).
RULES: dict[tuple[str, str], Rule] = {
    (COORDINATOR + "Join", ""): _rule(
        Role.AGGREGATOR, JoinRequest, Purpose.JOIN, "protocol_version identity software_version"
    ),
    (COORDINATOR + "Work", "heartbeat"): _rule(
        Role.AGGREGATOR, WorkRequest, Purpose.HEARTBEAT, "session heartbeat heartbeat.activity"
    ),
    (COORDINATOR + "Work", "refusal"): _rule(
        Role.AGGREGATOR,
        WorkRequest,
        Purpose.REFUSAL,
        "session refusal refusal.job_id refusal.round refusal.token refusal.code refusal.reason",
    ),
    (COORDINATOR + "Work", "update.tensors"): _rule(Role.AGGREGATOR, WorkRequest, Purpose.UPDATE, _UPDATE + _TENSORS),
    (COORDINATOR + "Work", "update.artifact"): _rule(Role.AGGREGATOR, WorkRequest, Purpose.UPDATE, _UPDATE + _ARTIFACT),
    (COORDINATOR + "Work", "update"): _rule(Role.AGGREGATOR, WorkRequest, Purpose.EVALUATION, _UPDATE),
    **{
        (COORDINATOR + "Work", f"mask.{part}"): _rule(
            Role.AGGREGATOR,
            WorkRequest,
            Purpose.MASKING,
            f"{_MASK} {_nested(f'mask.{part}', fields)}",
        )
        for part, fields in _MASK_PARTS.items()
    },
    (COORDINATOR + "Work", "mask.refusal"): _rule(
        Role.AGGREGATOR,
        WorkRequest,
        Purpose.REFUSAL,
        _MASK + " mask.refusal mask.refusal.code mask.refusal.reason",
    ),
    (COORDINATOR + "Work", "mask.tensors"): _rule(
        Role.AGGREGATOR, WorkRequest, Purpose.UPDATE, _MASK + _TENSORS.replace(" update.", " mask.")
    ),
    (COORDINATOR + "Work", "mask.artifact"): _rule(
        Role.AGGREGATOR, WorkRequest, Purpose.UPDATE, _MASK + _ARTIFACT.replace(" update.", " mask.")
    ),
    (COORDINATOR + "Stat", ""): _rule(Role.AGGREGATOR, StatRequest, Purpose.UPLOAD, "session job_id sha256"),
    (COORDINATOR + "Push", "header"): _rule(
        Role.AGGREGATOR,
        PushRequest,
        Purpose.UPLOAD,
        "header header.session header.job_id header.artifact header.artifact.sha256 header.artifact.size header.offset",
    ),
    (COORDINATOR + "Push", "chunk"): _rule(Role.AGGREGATOR, PushRequest, Purpose.UPLOAD, "chunk"),
    (COORDINATOR + "Fetch", ""): _rule(Role.AGGREGATOR, FetchRequest, Purpose.DOWNLOAD, "job_id sha256 offset"),
    (ORACLE + "Describe", ""): _rule(Role.ORACLE, DescribeRequest, Purpose.DESCRIBE),
    (ORACLE + "Embed", "texts"): _rule(Role.ORACLE, EmbedRequest, Purpose.EMBED, "batch" + _TEXTS + _PROMPTS),
    (ORACLE + "Embed", "images"): _rule(Role.ORACLE, EmbedRequest, Purpose.EMBED, "batch" + _IMAGES + _PROMPTS),
    (ORACLE + "PromptGradient", "texts"): _rule(
        Role.ORACLE, PromptGradientRequest, Purpose.PROMPT_GRADIENT, _TASK + _TEXTS + _PROMPTS
    ),
    (ORACLE + "PromptGradient", "images"): _rule(
        Role.ORACLE, PromptGradientRequest, Purpose.PROMPT_GRADIENT, _TASK + _IMAGES + _PROMPTS
    ),
    (BLOCKS + "DescribeStudent", ""): _rule(Role.ORACLE, DescribeStudentRequest, Purpose.DESCRIBE),
    (BLOCKS + "OpenSession", "start"): _rule(
        Role.ORACLE, OpenSessionRequest, Purpose.EVALUATION_KEYS, "start start.version start.keys"
    ),
    (BLOCKS + "Forward", "start"): _rule(
        Role.ORACLE, ForwardRequest, Purpose.CIPHERTEXTS, "start start.session start.pass_id start.have"
    ),
    **{
        (BLOCKS + "OpenSession", part): _rule(
            Role.ORACLE, OpenSessionRequest, Purpose.EVALUATION_KEYS, _nested(part, _PARTS[part])
        )
        for part in ("public_key", "digit")
    },
    **{
        (BLOCKS + "Forward", part): _rule(Role.ORACLE, ForwardRequest, Purpose.CIPHERTEXTS, _nested(part, _PARTS[part]))
        for part in ("features", "mask", "padding", "refreshed")
    },
}


def _pattern(expression: str) -> Callable[[str], bool]:
    compiled = re.compile(expression)
    return lambda text: compiled.fullmatch(text) is not None


# Form of the plain texts, by the name of the field, so that they cannot be used to carry something else.
_FORMS: dict[str, Callable[[str], bool]] = {
    "session": _pattern(r"[\x21-\x7e]{1,256}"),
    "token": _pattern(r"[\x21-\x7e]{1,256}"),
    "job_id": _pattern(r"[A-Za-z0-9._-]{1,128}"),
    **dict.fromkeys(("sha256", "version", "keys", "parameters"), _pattern(r"[0-9a-f]{64}")),
    "pass_id": _pattern(r"[0-9a-f]{32}"),
    "software_version": _pattern(r"[A-Za-z0-9.+-]{1,64}"),
    "activity": ACTIVITIES.__contains__,
    "code": frozenset(Code.__members__).__contains__,
    "reason": lambda text: len(text) <= 500 and text.isprintable(),
    "evaluations.name": {"personal", "global"}.__contains__,
}


def _member(message: Message) -> str:
    """The set member of the message's oneof; for an update or what belongs to masks, also that within it."""
    for oneof in message.DESCRIPTOR.oneofs:
        if len(oneof.fields) < 2:
            continue  # made up by the compiler for an optional field
        chosen = message.WhichOneof(oneof.name)
        if chosen == "update" and isinstance(message, WorkRequest):
            parameters = message.update.WhichOneof("parameters")
            return f"update.{parameters}" if parameters else "update"
        if chosen == "mask" and isinstance(message, WorkRequest):
            return f"mask.{message.mask.WhichOneof('body')}"
        return chosen or ""
    return ""


def _rules_of(method: str) -> list[Rule]:
    known = [rule for (name, _), rule in RULES.items() if name == method]
    if not known:
        raise Refused("this RPC is not on the allow-list")
    return known


def role_for(method: str) -> Role:
    """The party that the list names for an RPC. Raises Refused when the RPC is not listed."""
    return _rules_of(method)[0].role


def find_rule(method: str, message: Message) -> Rule:
    """The rule that lists this message. Raises Refused when there is none."""
    if type(message) is not _rules_of(method)[0].message:
        raise Refused("this type of message is not on the allow-list of the RPC")
    rule = RULES.get((method, _member(message)))
    if rule is None:
        raise Refused("this kind of message is not on the allow-list of the RPC")
    return rule


def _fields(message: Message, prefix: str = "") -> Iterator[tuple[str, str, object]]:
    """(dotted path, name of the field, value) of every set field at every depth. Raises Refused on unknown ones."""
    if len(UnknownFieldSet(message)):
        raise Refused("the message has fields that are not in the protocol")
    for field, value in message.ListFields():
        path = prefix + field.name
        many = value if field.is_repeated else [value]
        if field.message_type is None:
            yield from ((path, field.name, item) for item in many)
            continue
        for item in many:
            yield path, field.name, item
            yield from _fields(item, path + ".")


def check_form(rule: Rule, message: Message) -> None:
    """That only listed fields are set, and that texts have their form. Raises Refused, which names the field."""
    for path, name, value in _fields(message):
        if path not in rule.fields:
            raise Refused(f"the field {path} is not on the allow-list")
        if isinstance(value, str):
            form = _FORMS.get(".".join(path.split(".")[-2:])) or _FORMS.get(name)
            if form is not None and not form(value):
                raise Refused(f"the field {path} does not have its form")
        if name == "protocol_version" and value != protocol.VERSION:
            raise Refused(f"the field {path} is not this software's")
