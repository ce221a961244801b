"""Tiny random models in folders of transformers, compared with the library's own processors and forward."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fm_oracle.models import registry
from tests.encoders.pictures import PICTURES, opened
from tests.support.models import published
from veilfed.errors import Code, VeilfedError
from veilfed.packages import read

pytestmark = pytest.mark.encoders

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]
TEXTS = ["a b c", "h", "a b c d e f g h a b", "q z", "c d " * 40]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def vit(folder: Path) -> None:
    import transformers

    transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


def dino(folder: Path) -> None:
    import transformers

    sizes = {**SMALL, "image_size": 28, "patch_size": 14}
    transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).save_pretrained(folder)
    transformers.BitImageProcessor(
        size={"shortest_edge": 31}, crop_size={"height": 28, "width": 28}, do_center_crop=True
    ).save_pretrained(folder)


def convnext(folder: Path) -> None:
    import transformers

    config = transformers.ConvNextConfig(hidden_sizes=[4, 8, 12, 16], depths=[1, 1, 1, 1])
    transformers.ConvNextModel(config).save_pretrained(folder)
    transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(folder)


def swin(folder: Path) -> None:
    import transformers

    config = transformers.SwinConfig(image_size=32, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)
    transformers.SwinModel(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


IMAGES: dict[str, tuple[Callable[[Path], None], Callable[[Any], Any]]] = {
    "vit": (vit, lambda states: states[:, 0]),
    "dino": (dino, lambda states: states[:, 0]),
    "convnext": (convnext, lambda states: states.mean(dim=(2, 3))),
    "swin": (swin, lambda states: states.mean(dim=1)),
}


def processed(folder: Path) -> torch.Tensor:
    import transformers

    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pictures = [processor(opened(picture), return_tensors="pt")["pixel_values"] for picture in PICTURES]
    return torch.cat(pictures)


@pytest.mark.parametrize("name", IMAGES)
def test_images_give_the_library_s_features(tmp_path: Path, name: str) -> None:
    import transformers

    torch.manual_seed(0)
    write, pool = IMAGES[name]
    write(tmp_path / "tiny")
    model = registry.load(f"transformers:{tmp_path / 'tiny'}", tmp_path)
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "tiny").eval()
    with torch.inference_mode():
        expected = pool(theirs(pixel_values=processed(tmp_path / "tiny")).last_hidden_state).numpy()
    assert (model.card.name, model.card.modality) == ("transformers:tiny", "image")
    assert model.card.dimension == expected.shape[1]
    assert np.abs(model.embed(PICTURES) - expected).max() < 1e-4


def clip(folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**SMALL, "vocab_size": len(WORDS), "max_position_embeddings": 20, "eos_token_id": 3},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        folder
    )
    tokenizer().save(str(folder / "tokenizer.json"))


def test_clip_gives_projected_images_and_texts(tmp_path: Path) -> None:
    import transformers

    clip(tmp_path / "tiny")
    model = registry.load(f"transformers:{tmp_path / 'tiny'}", tmp_path)
    theirs = transformers.CLIPModel.from_pretrained(tmp_path / "tiny").eval()
    tokens = tokenizer()
    tokens.enable_truncation(20)
    tokens.enable_padding(pad_id=0)
    batch = tokens.encode_batch(TEXTS)
    with torch.inference_mode():
        output = theirs(
            input_ids=torch.tensor([encoding.ids for encoding in batch]),
            attention_mask=torch.tensor([encoding.attention_mask for encoding in batch]),
            pixel_values=processed(tmp_path / "tiny"),
        )
    projected = output.vision_model_output.pooler_output.numpy()
    texts = output.text_model_output.pooler_output.numpy()
    assert (model.card.dimension, model.card.blocks, model.card.modality) == (12, 2, "image")
    assert np.abs(model.embed(PICTURES) - projected).max() < 1e-4
    assert np.abs(model.embed_texts(TEXTS) - texts).max() < 1e-4


def test_siglip_gives_its_pooled_images_and_reads_no_text(tmp_path: Path) -> None:
    import transformers

    config = transformers.SiglipConfig(
        text_config={**SMALL, "vocab_size": 32, "max_position_embeddings": 8},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
    )
    transformers.SiglipModel(config).save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    model = registry.load(f"transformers:{tmp_path}", tmp_path)
    theirs = transformers.SiglipModel.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        expected = theirs.vision_model(pixel_values=processed(tmp_path)).pooler_output.numpy()
    assert np.abs(model.embed(PICTURES) - expected).max() < 1e-4
    with pytest.raises(VeilfedError, match="no text tower"):
        model.embed_texts(["a"])


def bert(folder: Path, **keys: Any) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, vocab_size=len(WORDS), max_position_embeddings=12, **keys)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("pooling", ["mean", "cls", None])
def test_text_gives_the_library_s_features(tmp_path: Path, pooling: str | None) -> None:
    import transformers

    bert(tmp_path)
    if pooling:
        (tmp_path / "1_Pooling").mkdir()
        modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    model = registry.load(f"transformers:{tmp_path}", tmp_path)
    assert (model.card.modality, model.card.dimension) == ("text", 16)
    assert (model.card.blocks, model.card.max_tokens) == (2, 12)
    theirs = transformers.BertModel.from_pretrained(tmp_path).eval()
    tokens = tokenizer()
    tokens.enable_truncation(12)
    expected = []
    for text in TEXTS:
        with torch.inference_mode():
            states = theirs(input_ids=torch.tensor([tokens.encode(text).ids])).last_hidden_state
        expected.append((states[:, 0] if pooling == "cls" else states.mean(dim=1)).numpy()[0])
    assert np.abs(model.embed(TEXTS) - np.array(expected)).max() < 1e-5
    assert np.array_equal(model.embed_texts(TEXTS), model.embed(TEXTS))


def test_the_published_minilm_as_a_folder_is_the_built_in_one(tmp_path: Path) -> None:
    """Real weights: two implementations of one model, read from the same file."""
    packages = published("minilm")
    for file in registry.find("minilm").files:
        (tmp_path / Path(file.member).name).write_bytes(read(file, packages))
    config = {"model_type": "bert", "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6}
    config |= {"num_attention_heads": 12, "intermediate_size": 1536, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    given = ["A happy person laughs.", "no", "Rates rose again, and nobody was surprised by it. " * 60]
    folder, built_in = (registry.load(name, packages) for name in (f"transformers:{tmp_path}", "minilm"))
    assert (folder.card.max_tokens, folder.card.dimension) == (built_in.card.max_tokens, built_in.card.dimension)
    assert np.abs(folder.embed(given) - built_in.embed(given)).max() < 1e-4


def test_the_version_follows_every_file(tmp_path: Path) -> None:
    bert(tmp_path)
    version = registry.load(f"transformers:{tmp_path}", tmp_path).card.version
    (tmp_path / "README.md").write_text("says nothing about embeddings")
    assert registry.load(f"transformers:{tmp_path}", tmp_path).card.version == version
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8}))
    assert registry.load(f"transformers:{tmp_path}", tmp_path).card.version != version


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    import transformers

    bert(tmp_path)
    weights = transformers.BertModel.from_pretrained(tmp_path).state_dict()
    del weights["encoder.layer.1.output.dense.weight"]
    transformers.BertModel.from_pretrained(tmp_path).save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(VeilfedError, match=r"layer\.1\.output\.dense") as caught:
        registry.load(f"transformers:{tmp_path}", tmp_path)
    assert caught.value.code is Code.MODEL_MISSING


def test_a_pooler_that_is_not_used_may_be_missing(tmp_path: Path) -> None:
    import transformers

    bert(tmp_path)
    whole = registry.load(f"transformers:{tmp_path}", tmp_path).embed(TEXTS)
    module = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    module.save_pretrained(tmp_path)
    assert np.array_equal(registry.load(f"transformers:{tmp_path}", tmp_path).embed(TEXTS), whole)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    bert(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "mine.Mine", "AutoConfig": "mine.Config"}
    config["model_type"] = "mine"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VeilfedError) as caught:
        registry.load(f"transformers:{tmp_path}", tmp_path)
    assert caught.value.code is Code.MODEL_MISSING
