"""Vocabularies of GGUF files: cut as each family cuts, kept from load to load, refused where they cannot be used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from core.errors import ModelLoadError
from core.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from core.tokenizer_gguf import build_tokenizer, parts_from_fields
from tests.core.vocabularies import MODEL, TEXTS, gguf_bpe_fields
from tools.make_tiny_gguf import CHAT_TEMPLATE, TEXT, write_gguf

# SentencePiece as a GGUF has it: unknown, BOS, EOS, every byte, then pieces with scores.
PIECES = ["▁", *"abcdehlorw", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "bc", "ab"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES, "<|tool|>"]
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def spm(**changes: Any) -> Tokenizer:
    return build_tokenizer(parts_from_fields(SPM | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(MODEL, tmp_path_factory.mktemp("gguf") / "model.gguf")


class TestPreTokenizers:
    """Text is split as each family's own tokenizer.json says."""

    WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ORIGINALS: Mapping[str, Any] = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "llama-bpe": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS + r"\p{N}{1,3}" + REST), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        "qwen2": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS + r"\p{N}" + REST), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    }

    @pytest.mark.parametrize("pre", ORIGINALS)
    @pytest.mark.parametrize("text", [*TEXTS, TEXT])
    def test_pieces_are_the_familys_own(self, pre: str, text: str) -> None:
        built = HfTokenizer.from_str(parts_from_fields(gguf_bpe_fields(pre))["json"]).pre_tokenizer
        assert self.ORIGINALS[pre].pre_tokenize_str(text) == built.pre_tokenize_str(text)

    def test_families_differ_where_they_should(self) -> None:
        def pieces(pre: str | None) -> list[str]:
            built = HfTokenizer.from_str(parts_from_fields(gguf_bpe_fields(pre))["json"]).pre_tokenizer
            return [piece for piece, _ in built.pre_tokenize_str("1234 I'LL (x)")]

        assert ["1234", "ĠI", "'", "LL", "Ġ(", "x", ")"] == pieces("gpt-2")
        assert ["1", "2", "3", "4", "ĠI", "'", "LL", "Ġ(", "x", ")"] == pieces("smollm")
        assert ["123", "4", "ĠI", "'LL", "Ġ(", "x", ")"] == pieces("llama-bpe") == pieces("pixtral")
        assert ["1", "2", "3", "4", "ĠI", "'LL", "Ġ(", "x", ")"] == pieces("qwen2")
        assert ["123", "4", "ĠI", "'", "LL", "Ġ", "(", "x", ")"] == pieces("default") == pieces(None)

    def test_unknown_pre_tokenizer_is_refused_by_name(self) -> None:
        with pytest.raises(ModelLoadError, match="'chatglm-bpe' is not supported"):
            parts_from_fields(gguf_bpe_fields("chatglm-bpe"))

    def test_llama3_files_from_before_the_flag_add_bos_and_others_do_not(self) -> None:
        assert build_tokenizer(parts_from_fields(gguf_bpe_fields("llama-bpe"))).adds_bos
        assert not build_tokenizer(parts_from_fields(gguf_bpe_fields("smollm"))).adds_bos
        said = gguf_bpe_fields("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}
        assert not build_tokenizer(parts_from_fields(said)).adds_bos

    def test_llama3_takes_a_piece_that_is_a_token_whole(self) -> None:
        """Without a merge that leads to it, only ignore_merges finds it."""
        fields = gguf_bpe_fields("llama-bpe")
        tokens = [*fields["tokenizer.ggml.tokens"], "zqx"]
        fields |= {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [*fields["tokenizer.ggml.token_type"], 1],
        }
        ids = build_tokenizer(parts_from_fields(fields)).encode("zqx", add_special_tokens=False)
        assert [len(tokens) - 1] == ids


class TestSentencePiece:
    def texts(self, text: str) -> list[str]:
        tokenizer = spm()
        return [SPM_TOKENS[i] for i in tokenizer.encode(text)]

    def test_text_starts_with_bos_and_a_space_of_the_tokenizers_own(self) -> None:
        assert ["<s>", "▁hello", "▁wor", "ld"] == self.texts("hello world")

    def test_characters_without_a_piece_fall_back_to_bytes(self) -> None:
        assert ["<s>", "▁", "a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b"] == self.texts("a😀b")

    def test_best_score_is_merged_first(self) -> None:
        assert ["<s>", "▁", "a", "bc"] == self.texts("abc")
        scores = [-score for score in SPM["tokenizer.ggml.scores"]]
        assert [SPM_TOKENS.index(t) for t in ("<s>", "▁", "ab", "c")] == spm(scores=scores).encode("abc")

    def test_own_space_is_not_part_of_the_text(self) -> None:
        tokenizer = spm()
        for text in ("hello world", "  hello", "a😀b", " ", "hello\n"):
            assert text == tokenizer.decode(tokenizer.encode(text))

    def test_generated_text_keeps_its_first_space(self) -> None:
        tokenizer = spm()
        prompt, generated = tokenizer.encode("hello"), tokenizer.encode("world", add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer)

        assert " world" == "".join(detokenizer.decode(i) for i in generated)
        assert "world" == tokenizer.decode(generated)
        assert "hello world" == tokenizer.decode([*prompt, *generated])

    def test_without_the_prefix_no_space_is_added_or_dropped(self) -> None:
        tokenizer = spm(add_space_prefix=False)
        assert ["<s>", "hello"] == [SPM_TOKENS[i] for i in tokenizer.encode("hello")]
        assert " hello" == tokenizer.decode(tokenizer.encode(" hello"))

    @pytest.mark.parametrize("piece", ["<0xZZ>", "<0x F>", "<0x-1>", "<0x0A"])
    def test_piece_that_only_looks_like_a_byte_is_its_text(self, piece: str) -> None:
        more = {"tokens": [*SPM_TOKENS, piece], "scores": [*SPM["tokenizer.ggml.scores"], 0.0]}
        tokenizer = spm(**more, token_type=[*SPM["tokenizer.ggml.token_type"], 1])
        assert piece == tokenizer.decode([len(SPM_TOKENS)])

    def test_streamed_byte_tokens_make_one_character(self) -> None:
        tokenizer = spm()
        detokenizer = IncrementalDetokenizer(tokenizer)
        ids = tokenizer.encode("😀", add_special_tokens=False)[1:]
        assert ["", "", "", "😀"] == [detokenizer.decode(i) for i in ids]

    def test_defaults_of_files_that_say_little(self) -> None:
        fields = {k: v for k, v in SPM.items() if not k.endswith("_token_id")}
        tokenizer = build_tokenizer(parts_from_fields(fields))
        assert (1, True, {2}) == (tokenizer.bos_token_id, tokenizer.adds_bos, tokenizer.eos_token_ids)
        assert "<s>" == tokenizer.special_token_texts["bos_token"]

    def test_user_defined_token_is_found_and_kept_as_text(self) -> None:
        tokenizer = spm()
        ids = tokenizer.encode("hello<|tool|>")
        assert len(SPM_TOKENS) - 1 == ids[-1]
        assert "hello<|tool|>" == tokenizer.decode(ids)

    @given(st.text(alphabet="abc helo wrd\n😀é▁", max_size=20))
    def test_joined_pieces_equal_the_packages_decoding(self, text: str) -> None:
        tokenizer = spm()
        package = HfTokenizer.from_str(parts_from_fields(SPM)["json"])
        ids = tokenizer.encode(text)
        assert package.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


class TestWhatFilesLeaveOpen:
    BPE: Mapping[str, Any] = gguf_bpe_fields("smollm")

    def load(self, without: str = "", **changes: Any) -> Tokenizer:
        fields = dict(self.BPE) | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
        fields.pop(f"tokenizer.ggml.{without}", None)
        return build_tokenizer(parts_from_fields(fields))

    @pytest.mark.parametrize("none", [-1, 2**32 - 1, 364, None])
    def test_id_without_a_token_is_as_good_as_none(self, none: int | None) -> None:
        tokenizer = self.load(bos_token_id=none, eos_token_id=none, eot_token_id=none, add_bos_token=True)
        assert (None, False, frozenset()) == (tokenizer.bos_token_id, tokenizer.adds_bos, tokenizer.eos_token_ids)
        assert self.load(add_bos_token=False).encode("hello") == tokenizer.encode("hello")
        assert 1 == spm(bos_token_id=none).bos_token_id

    @pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "eot_token_id"])
    @pytest.mark.parametrize("value", [[1], "1", True])
    def test_id_that_is_no_number_is_refused(self, name: str, value: Any) -> None:
        with pytest.raises(ModelLoadError, match=f"{name} is .* a whole number is needed"):
            self.load(**{name: value})

    def test_tokens_that_only_fill_up_are_none(self) -> None:
        """Converters write [PAD364] and the like for rows of the model that no token stands for."""
        tokens, types = self.BPE["tokenizer.ggml.tokens"], self.BPE["tokenizer.ggml.token_type"]
        filled = self.load(tokens=[*tokens, "[PAD364]", "[PAD365]"], token_type=[*types, 5, 5])

        assert (len(tokens), b"", "") == (filled.vocab_size, filled.token_bytes(364), filled.token_text(365))
        assert "" == filled.decode([364, 365])
        more = {name: [*SPM[f"tokenizer.ggml.{name}"], filling] for name, filling in
                (("tokens", "[PAD]"), ("scores", 0.0), ("token_type", 5))}  # fmt: skip
        assert len(SPM_TOKENS) == spm(**more).vocab_size

    def test_end_of_a_turn_is_an_end_even_if_it_is_said_to_be_text(self) -> None:
        """Tokens added in finetuning are often user-defined; the model would go on and on, and say <|im_end|>."""
        tokens, types = self.BPE["tokenizer.ggml.tokens"], self.BPE["tokenizer.ggml.token_type"]
        tokenizer = self.load(tokens=[*tokens, "<|im_end|>", "<x>"], token_type=[*types, 4, 4], eos_token_id=365)

        assert {364, 365} == tokenizer.eos_token_ids
        assert "" == tokenizer.decode([364, 365])
        assert [364] == tokenizer.encode("<|im_end|>", add_special_tokens=False)

    def test_without_types_the_named_tokens_are_special(self) -> None:
        tokenizer = self.load(without="token_type", add_bos_token=True)
        assert self.load().encode("hello<|eos|>x") == tokenizer.encode("<|bos|>hello<|eos|>x")[1:]
        assert "hello" == tokenizer.decode(tokenizer.encode("hello<|eos|>"))

    @pytest.mark.parametrize("template", [7, ["x"], None])
    def test_template_that_is_no_text_is_none(self, template: Any) -> None:
        fields = dict(self.BPE) | {"tokenizer.chat_template": template}
        assert build_tokenizer(parts_from_fields(fields)).chat_template is None


class TestGgufVocabularyIsKept:
    def test_second_load_equals_the_first(self, gguf: Path, tmp_path: Path) -> None:
        first = load_tokenizer(gguf, cache_dir=tmp_path)
        (file,) = tmp_path.iterdir()
        written = file.stat().st_mtime_ns
        second = load_tokenizer(gguf, cache_dir=tmp_path)

        assert written == file.stat().st_mtime_ns
        assert first.encode(TEXT) == second.encode(TEXT)
        assert CHAT_TEMPLATE == first.chat_template == second.chat_template
        for name in ("vocab_size", "bos_token_id", "adds_bos", "eos_token_ids", "special_token_texts"):
            assert getattr(first, name) == getattr(second, name), name

    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"json": "{}"}'])
    def test_damaged_file_is_made_anew(self, content: str, gguf: Path, tmp_path: Path) -> None:
        first = load_tokenizer(gguf, cache_dir=tmp_path)
        (file,) = tmp_path.iterdir()
        whole = file.read_text()
        file.write_text(content)

        assert first.encode(TEXT) == load_tokenizer(gguf, cache_dir=tmp_path).encode(TEXT)
        assert whole == file.read_text()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.merges": ["no such"]}, "vocabulary is damaged"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "vocabulary is damaged"),
        ({"tokenizer.ggml.merges": "a b"}, "merges is 'a b', an array is needed"),
        ({"tokenizer.ggml.tokens": 7}, "tokens is 7, an array is needed"),
        ({"tokenizer.ggml.token_type": 1}, "token_type is 1, an array is needed"),
    ],
)
def test_vocabulary_that_cannot_be_used_is_a_load_error(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        parts_from_fields(gguf_bpe_fields("smollm") | changes)


def test_missing_gguf_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_tokenizer(tmp_path / "none.gguf")
