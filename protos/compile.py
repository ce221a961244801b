"""Generates services/veilfed/v1 from the protos, and guards the wire.

python protos/compile.py            generate the Python code
python protos/compile.py --check    fail if the committed code differs from what would be generated,
                                    or if a change breaks the wire against protos/baseline.binpb
python protos/compile.py --accept   take today's protos as the new baseline
"""

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).parent
GENERATED = PROTOS.parent / "services" / "veilfed" / "v1"
BASELINE = PROTOS / "baseline.binpb"
SOURCES = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.glob("veilfed/v1/*.proto"))


def run_protoc(*outputs: str) -> None:
    """Compiles all sources; raises RuntimeError when protoc refuses them."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    status = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *plugins, *outputs, *SOURCES])
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


def generate(root: Path) -> None:
    """Writes the generated package below `root`/veilfed/v1."""
    root.mkdir(parents=True, exist_ok=True)
    run_protoc(
        f"--python_out={root}",
        f"--grpc_python_out={root}",
        f"--mypy_out=quiet:{root}",
        f"--mypy_grpc_out=quiet:{root}",
    )
    (root / "veilfed" / "v1" / "__init__.py").write_text('"""Generated from protos/veilfed/v1; do not edit."""\n')


def descriptors() -> FileDescriptorSet:
    """Today's protos as a descriptor set, without comments."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "set.binpb"
        run_protoc(f"--descriptor_set_out={target}")
        return FileDescriptorSet.FromString(target.read_bytes())


def messages(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    """All messages by full name, nested ones included."""
    found: dict[str, DescriptorProto] = {}

    def visit(prefix: str, message: DescriptorProto) -> None:
        name = f"{prefix}.{message.name}"
        found[name] = message
        for nested in message.nested_type:
            visit(name, nested)

    for file in files.file:
        for message in file.message_type:
            visit(file.package, message)
    return found


def enums(files: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    """All enums by full name."""
    found = {f"{file.package}.{enum.name}": enum for file in files.file for enum in file.enum_type}
    for name, message in messages(files).items():
        found.update({f"{name}.{enum.name}": enum for enum in message.enum_type})
    return found


def broken_fields(old: DescriptorProto, new: DescriptorProto, name: str) -> list[str]:
    fields = {field.number: field for field in new.field}
    reserved = {number for span in new.reserved_range for number in range(span.start, span.end)}
    problems = []
    for field in old.field:
        now = fields.get(field.number)
        where = f"{name}.{field.name} (number {field.number})"
        if now is None:
            if field.number not in reserved:
                problems.append(f"{where} was removed and its number not reserved")
            continue
        if (now.type, now.label, now.type_name) != (field.type, field.label, field.type_name):
            problems.append(f"{where} changed its type or label")
        if now.name != field.name:
            problems.append(f"{where} was renamed to {now.name}")
        oneof = old.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        oneof_now = new.oneof_decl[now.oneof_index].name if now.HasField("oneof_index") else None
        if oneof != oneof_now:
            problems.append(f"{where} moved from oneof {oneof} to {oneof_now}")
    return problems


def broken_enums(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    problems = []
    now = enums(new)
    for name, enum in enums(old).items():
        if name not in now:
            problems.append(f"enum {name} was removed")
            continue
        values = {value.number: value.name for value in now[name].value}
        problems += [
            f"{name}.{value.name} (number {value.number}) was removed or renamed"
            for value in enum.value
            if values.get(value.number) != value.name
        ]
    return problems


def broken_services(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    def methods(files: FileDescriptorSet) -> dict[str, tuple[str, str, bool, bool]]:
        return {
            f"{file.package}.{service.name}/{m.name}": (
                m.input_type,
                m.output_type,
                m.client_streaming,
                m.server_streaming,
            )
            for file in files.file
            for service in file.service
            for m in service.method
        }

    now = methods(new)
    return [f"method {name} was removed or changed" for name, shape in methods(old).items() if now.get(name) != shape]


def broken(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """What in `new` a peer that speaks `old` would misread; empty when nothing is broken."""
    problems = []
    now = messages(new)
    for name, message in messages(old).items():
        if name in now:
            problems += broken_fields(message, now[name], name)
        else:
            problems.append(f"message {name} was removed")
    return problems + broken_enums(old, new) + broken_services(old, new)


def drift() -> list[str]:
    """Generated files whose committed form is not what the protos give."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "veilfed" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in GENERATED.iterdir() if path.is_file()}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def check() -> list[str]:
    problems = [f"services/veilfed/v1/{name} is not what the protos give: run protos/compile.py" for name in drift()]
    return problems + broken(FileDescriptorSet.FromString(BASELINE.read_bytes()), descriptors())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="fail on drift or on a break of the wire")
    group.add_argument("--accept", action="store_true", help="take today's protos as the baseline")
    arguments = parser.parse_args()
    if arguments.check:
        problems = check()
        for problem in problems:
            print(problem, file=sys.stderr)
        sys.exit(1 if problems else 0)
    if arguments.accept:
        BASELINE.write_bytes(descriptors().SerializeToString(deterministic=True))
    else:
        generate(GENERATED.parent.parent)


if __name__ == "__main__":
    main()
