"""Damaged files of data sets and models: they are read, or refused with a typed error; nothing else happens."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from client_agent.data.config import DataConfig
from client_agent.data.source import load
from fm_oracle.models import registry
from tests.support import onnx_folders
from tests.support.fuzz import bounded_memory, changed, profile  # noqa: F401  used by being there
from tests.support.models import png
from veilfed.errors import Code, VeilfedError

CONFIG: TypeAdapter[DataConfig] = TypeAdapter(DataConfig)

WRITER = {"users": ["a", "b"], "num_samples": [1, 2]}
DATA = {"a": {"x": [[0.5] * 784], "y": [3]}, "b": {"x": [[0.0] * 784, [1.0] * 784], "y": [0, 61]}}
FEMNIST = json.dumps({**WRITER, "user_data": DATA}).encode()
# Shorter than the real thing, so that a change hits its structure.
SHORT = json.dumps({**WRITER, "user_data": {name: {"x": [], "y": user["y"]} for name, user in DATA.items()}}).encode()

INFO = json.dumps({"features": {"label": {"names": ["bad", "good"], "_type": "ClassLabel"}}}).encode()
STATE = json.dumps({"_data_files": [{"filename": "data.arrow"}], "_split": None}).encode()


def arrow() -> bytes:
    image = png(onnx_folders.RNG.integers(0, 256, (2, 2, 3), "uint8"))
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"text": ["a", "b"], "label": [0, 1], "image": pa.array([{"bytes": image}] * 2, kind)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def check_data(**section: object) -> None:
    config = CONFIG.validate_python(section)
    try:
        samples = load(config)
    except VeilfedError as error:
        assert error.code is Code.DATA_INVALID  # noqa: PT017  either outcome is right
        return
    assert len(samples.inputs) == len(samples.labels) == len(samples.groups) >= 2


@profile(60)
@given(st.one_of(changed(FEMNIST), changed(SHORT)))
def test_any_file_of_leaf(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "all_data_0.json").write_bytes(data)
    check_data(source="femnist", root=tmp_path, institutions=1, institution=1)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data.arrow"])
def test_any_file_of_a_saved_data_set(tmp_path: Path, name: str) -> None:
    whole = {"state.json": STATE, "dataset_info.json": INFO, "data.arrow": arrow()}
    for other, data in whole.items():
        (tmp_path / other).write_bytes(data)

    @profile(150)
    @given(changed(whole[name]), st.sampled_from(["text", "image"]))
    def check(data: bytes, column: str) -> None:
        (tmp_path / name).write_bytes(data)
        check_data(source="huggingface", path=tmp_path, **{column: column})

    check()


@pytest.mark.parametrize("name", ["preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "model.onnx"])
def test_any_file_of_a_model_s_folder(tmp_path: Path, name: str) -> None:
    make = onnx_folders.images if name in {"preprocessor_config.json", "model.onnx"} else onnx_folders.texts
    folder = make(tmp_path / "tiny")

    @profile(60)
    @given(changed((folder / name).read_bytes()))
    def check(data: bytes) -> None:
        (folder / name).write_bytes(data)
        try:
            card = registry.load(f"onnx:{folder}", tmp_path).card
        except VeilfedError as error:
            assert error.code in {Code.MODEL_MISSING, Code.STATE_CORRUPT, Code.INPUT_INVALID}  # noqa: PT017
            return
        assert card.dimension > 0

    check()
