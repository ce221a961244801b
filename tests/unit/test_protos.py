"""The generated code is what the protos give, and a break of the wire is found."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

COMPILE = Path(__file__).parents[2] / "protos" / "compile.py"
spec = importlib.util.spec_from_file_location("compile_protos", COMPILE)
assert spec is not None
assert spec.loader is not None
protos = importlib.util.module_from_spec(spec)
spec.loader.exec_module(protos)


def test_committed_code_and_wire_are_sound() -> None:
    assert protos.check() == []


def message(files: FileDescriptorSet, name: str) -> DescriptorProto:
    found: DescriptorProto = protos.messages(files)[f"veilfed.v1.{name}"]
    return found


def remove_field(files: FileDescriptorSet) -> None:
    del message(files, "Update").field[0]


def retype_field(files: FileDescriptorSet) -> None:
    message(files, "Update").field[5].type = FieldDescriptorProto.TYPE_FLOAT


def rename_field(files: FileDescriptorSet) -> None:
    message(files, "Update").field[0].name = "job"


def make_repeated(files: FileDescriptorSet) -> None:
    message(files, "Update").field[0].label = FieldDescriptorProto.LABEL_REPEATED


def leave_oneof(files: FileDescriptorSet) -> None:
    message(files, "Update").field[3].ClearField("oneof_index")


def remove_message(files: FileDescriptorSet) -> None:
    del files.file[0].message_type[0]


def renumber_enum(files: FileDescriptorSet) -> None:
    protos.enums(files)["veilfed.v1.DType"].value[1].number = 9


def stream_method(files: FileDescriptorSet) -> None:
    next(file for file in files.file if file.service).service[0].method[0].server_streaming = True


@pytest.mark.parametrize(
    "change",
    [
        remove_field,
        retype_field,
        rename_field,
        make_repeated,
        leave_oneof,
        remove_message,
        renumber_enum,
        stream_method,
    ],
)
def test_a_change_that_breaks_the_wire_is_found(change: Callable[[FileDescriptorSet], None]) -> None:
    old, new = protos.descriptors(), protos.descriptors()
    change(new)
    assert protos.broken(old, new)


def test_a_new_field_and_a_reserved_removal_break_nothing() -> None:
    old, new = protos.descriptors(), protos.descriptors()
    update = message(new, "Update")
    removed = update.field[0].number
    del update.field[0]
    update.reserved_range.add(start=removed, end=removed + 1)
    update.field.add(name="more", number=99, type=FieldDescriptorProto.TYPE_STRING)
    assert protos.broken(old, new) == []
