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

    @pytest.mark.parametrize(("form", "expected"), [("<s> $A", [0, 5]), ("$A </s>", [5]), ("$A", [5])])
    def test_bos_that_nobody_names_is_what_comes_before_a_text(
        self, form: str, expected: list[int], tmp_path: Path
    ) -> None:
        hf = self.make()
        hf.post_processor = processors.TemplateProcessing(single=form, special_tokens=[("<s>", 0), ("</s>", 1)])
        tokenizer = load_tokenizer(self.save(tmp_path, hf))
        assert expected == tokenizer.encode("a")
        assert [0, 5] == tokenizer.encode("<s>a")

    def test_end_tokens_are_gathered_from_all_files(self, tmp_path: Path) -> None:
        path = self.save(
            tmp_path,
            self.make(),
            tokenizer_config={"eos_token": {"content": "</s>"}},
            generation_config={"eos_token_id": [3, 4]},
            config={"eos_token_id": 2},
        )
        assert {1, 2, 3, 4} == load_tokenizer(path).eos_token_ids

    def test_no_end_is_no_end_and_other_things_are_refused(self, tmp_path: Path) -> None:
        path = self.save(tmp_path, self.make(), generation_config={"eos_token_id": -1}, config={"eos_token_id": None})
        assert frozenset() == load_tokenizer(path).eos_token_ids
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
        with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id is '</s>'"):
            load_tokenizer(path)

    def test_what_training_cut_and_filled_is_left_whole(self, tmp_path: Path) -> None:
        hf = self.make()
        hf.enable_truncation(2)
        hf.enable_padding(length=9)
        hf.model.dropout = 1.0  # no merge at all
        assert [5, 5, 4, 4] == load_tokenizer(self.save(tmp_path, hf)).encode("a abb")

    @pytest.mark.parametrize("older", [False, True])
    def test_tokens_that_only_the_config_knows_are_added(self, older: bool, tmp_path: Path) -> None:
        """With the ids it says, found in the text, and special where it says so."""
        described = {"6": {"content": "<|end|>", "special": True}, "7": {"content": "<tool>", "special": False}}
        files: dict[str, Any] = {"tokenizer_config": {"eos_token": "<|end|>", "added_tokens_decoder": described}}
        if older:
            files = {"tokenizer_config": {"eos_token": "<|end|>"}, "added_tokens": {"<tool>": 7, "<|end|>": 6}}
        tokenizer = load_tokenizer(self.save(tmp_path, self.make(), **files))

        assert [5, 6, 7] == tokenizer.encode("a<|end|><tool>")
        assert "a<tool>" == tokenizer.decode([5, 6, 7])
        assert ({6}, 8) == (tokenizer.eos_token_ids, tokenizer.vocab_size)

    def test_token_that_cannot_have_its_id_is_refused(self, tmp_path: Path) -> None:
        described = {"9": {"content": "<tool>", "special": False}}
        path = self.save(tmp_path, self.make(), tokenizer_config={"added_tokens_decoder": described})
        with pytest.raises(ModelLoadError, match=r"<tool> has id 9, tokenizer\.json leaves 6 for it"):
            load_tokenizer(path)

    @pytest.mark.parametrize("described", [["x"], {"a": {"content": "x"}}, {"6": {"text": "x"}}, {"6": "x"}])
    def test_description_of_tokens_that_is_none_is_refused(self, described: Any, tmp_path: Path) -> None:
        path = self.save(tmp_path, self.make(), tokenizer_config={"added_tokens_decoder": described})
        with pytest.raises(ModelLoadError, match="added_tokens_decoder cannot be read"):
            load_tokenizer(path)

    @pytest.mark.parametrize(
        "named",
        [
            {"eos_token": "b"},
            {"additional_special_tokens": ["b"]},
            {"additional_special_tokens": [{"content": "b"}]},
            {"extra_special_tokens": {"image_token": "b"}},
        ],
    )
    @pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
    def test_named_special_tokens_are_special(self, named: dict[str, Any], file: str, tmp_path: Path) -> None:
        """Also where tokenizer.json has them as plain pieces: found whole, and no text."""
        tokenizer = load_tokenizer(self.save(tmp_path, self.make(), **{file: named}))
        assert [5, 4, 5] == tokenizer.encode("aba")
        assert "a a" == tokenizer.decode([5, 4, 5])

    def test_named_special_token_that_does_not_exist_is_not_made_up(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(self.save(tmp_path, self.make(), tokenizer_config={"pad_token": "[PAD]"}))
        assert 6 == tokenizer.vocab_size

    def test_chat_template_file_comes_before_the_config(self, tmp_path: Path) -> None:
        path = self.save(tmp_path, self.make(), tokenizer_config={"chat_template": "from config"})
        assert "from config" == load_tokenizer(path).chat_template
        (path / "chat_template.jinja").write_text("from file")
        assert "from file" == load_tokenizer(path).chat_template

    def test_of_several_chat_templates_the_default_is_taken(self, tmp_path: Path) -> None:
        templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
        path = self.save(tmp_path, self.make(), tokenizer_config={"chat_template": templates})
        assert "yes" == load_tokenizer(path).chat_template

    @pytest.mark.parametrize("template", [[], [{"name": "rag", "template": "x"}], ["x"], {"default": "x"}, 7, None])
    def test_what_holds_no_template_is_none(self, template: Any, tmp_path: Path) -> None:
        path = self.save(tmp_path, self.make(), tokenizer_config={"chat_template": template})
        assert load_tokenizer(path).chat_template is None

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
