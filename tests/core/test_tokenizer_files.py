"""Directories of tokenizer files: what each of them says, and which of them is believed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from core.errors import ModelLoadError
from core.tokenizer import load_tokenizer
from core.tokenizer_files import byte_alphabet


class TestDirectories:
    def save(self, path: Path, tokenizer: HfTokenizer, **files: Mapping[str, Any]) -> Path:
        tokenizer.save(str(path / "tokenizer.json"))
        for name, content in files.items():
            (path / f"{name}.json").write_text(json.dumps(content))
        return path

    def make(self) -> HfTokenizer:
        tokenizer = HfTokenizer(models.BPE({"<s>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5}, [("▁", "a")]))
        tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        return tokenizer

    def test_metaspace_decoder_is_understood(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(self.save(tmp_path, self.make()))
        assert [5, 5, 4] == tokenizer.encode("a ab")
        assert "a ab" == tokenizer.decode([5, 5, 4])

    @pytest.mark.parametrize("said", [True, False, None])
    def test_bos_follows_the_flag_or_else_the_post_processor(self, said: bool | None, tmp_path: Path) -> None:
        hf = self.make()
        hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        config = {"bos_token": "<s>"} | ({} if said is None else {"add_bos_token": said})
        tokenizer = load_tokenizer(self.save(tmp_path, hf, tokenizer_config=config))
        assert ([5] if said is False else [0, 5]) == tokenizer.encode("a")
        assert ([] if said is False else [0]) == tokenizer.encode("")

    def test_end_tokens_are_gathered_from_all_files(self, tmp_path: Path) -> None:
        path = self.save(
            tmp_path,
            self.make(),
            tokenizer_config={"eos_token": {"content": "</s>"}},
            generation_config={"eos_token_id": [3, 4]},
            config={"eos_token_id": 2},
        )
        assert {1, 2, 3, 4} == load_tokenizer(path).eos_token_ids

    def test_chat_template_file_comes_before_the_config(self, tmp_path: Path) -> None:
        path = self.save(tmp_path, self.make(), tokenizer_config={"chat_template": "from config"})
        assert "from config" == load_tokenizer(path).chat_template
        (path / "chat_template.jinja").write_text("from file")
        assert "from file" == load_tokenizer(path).chat_template

    def test_of_several_chat_templates_the_default_is_taken(self, tmp_path: Path) -> None:
        templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
        path = self.save(tmp_path, self.make(), tokenizer_config={"chat_template": templates})
        assert "yes" == load_tokenizer(path).chat_template

    def test_decoder_whose_bytes_are_unknown_is_refused(self, tmp_path: Path) -> None:
        hf = self.make()
        hf.decoder = decoders.WordPiece()
        with pytest.raises(ModelLoadError, match="WordPiece is not supported"):
            load_tokenizer(self.save(tmp_path, hf))

    def test_missing_or_damaged_file_is_a_load_error(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
            load_tokenizer(tmp_path)

    def test_lowercasing_normalizer_does_not_touch_special_tokens(self, tmp_path: Path) -> None:
        hf = self.make()
        hf.normalizer = normalizers.Lowercase()
        assert [0, 5] == load_tokenizer(self.save(tmp_path, hf)).encode("<s>A")


def test_alphabet_gives_every_byte_its_own_character() -> None:
    assert set(pre_tokenizers.ByteLevel.alphabet()) == set(byte_alphabet())
    assert list(range(256)) == sorted(byte_alphabet().values())
