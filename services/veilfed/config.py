"""Reads YAML files into pydantic models, with errors that name the file, the line and the key."""

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from veilfed.errors import Code, VeilfedError

__all__ = ["MAX_YAML_BYTES", "Strict", "load_config", "parse_yaml", "read_text", "validate"]

MAX_YAML_BYTES = 1024 * 1024

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of all configuration: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases (a short file could expand without bound) and without duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not supported", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "keys must be text", key_node.start_mark)
            if key in mapping:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


_Loader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG,
    lambda loader, node: loader.construct_mapping(node),  # type: ignore[arg-type]
)


def _compose(text: str, where: str, code: Code) -> tuple[yaml.Node | None, Any]:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_YAML_BYTES:
        raise VeilfedError(code, f"{where}: longer than {MAX_YAML_BYTES} bytes")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return node, None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise VeilfedError(code, f"{where}: {line}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise VeilfedError(code, f"{where}: not readable as YAML ({type(error).__name__})") from None
    except RecursionError:
        raise VeilfedError(code, f"{where}: nested too deeply") from None


def parse_yaml(text: str, where: str, code: Code = Code.CONFIG_INVALID) -> Any:
    """Parses one YAML (or JSON) document; `where` names it in errors, which are of `code`."""
    return _compose(text, where, code)[1]


def _found(node: yaml.Node | None, problem: ErrorDetails) -> tuple[int | None, str]:
    """(line, key) of a problem: the line (from 1) of its deepest part that the document has, the key as it is there."""
    line, keys = None, []
    for part in problem["loc"]:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == part]
            if not pairs and not (problem["type"] == "missing" and part == problem["loc"][-1]):
                continue  # the tag of a union is not a key of the document
            if pairs:
                line, node = pairs[0][0].start_mark.line + 1, pairs[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        keys.append(str(part))
    return line, ".".join(keys) or "(document)"


def validate(
    model: type[Model],
    text: str,
    where: str,
    code: Code = Code.CONFIG_INVALID,
    *,
    lines: bool = True,
    hint: str | None = None,
) -> Model:
    """Parses `text` as YAML or JSON and validates it as `model`.

    Raises VeilfedError(code) that names `where`, the line and the key of every problem; never the value, which may
    be private. Without `lines`, no line: for a text that nobody wrote.
    """
    node, document = _compose(text, where, code)
    if not isinstance(document, dict):
        raise VeilfedError(code, f"{where}: expected keys and values, found {type(document).__name__}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = []
        for problem in error.errors(include_url=False, include_input=False, include_context=False):
            line, key = _found(node, problem)
            words = problem["msg"].removeprefix("Value error, ")
            # What is wrong with several keys together is said by words that name them.
            where_in = f"{key}: " if problem["loc"] else ""
            problems.append(f"{f'line {line}: ' if line and lines else ''}{where_in}{words}")
        raise VeilfedError(code, f"{where}: " + "; ".join(problems), hint) from None


def read_text(path: Path) -> str:
    """The text of a YAML file. Raises VeilfedError(CONFIG_INVALID or FILE_UNUSABLE)."""
    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise VeilfedError(Code.CONFIG_INVALID, f"{path}: longer than {MAX_YAML_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise VeilfedError(Code.CONFIG_INVALID, f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None


def load_config(model: type[Model], path: Path) -> Model:
    """Reads and validates a configuration file. Raises VeilfedError(CONFIG_INVALID or FILE_UNUSABLE)."""
    return validate(model, read_text(path), str(path))
