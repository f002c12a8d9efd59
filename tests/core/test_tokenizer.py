"""Tokenizers: ids and bytes agree with the package `tokenizers`, and streamed text is the whole text, cut anywhere."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from core.errors import InvalidRequest, ModelLoadError
from core.tokenizer import ByteTokenizer, IncrementalDetokenizer, Tokenizer, load_tokenizer
from core.tokenizer_files import byte_alphabet
from core.tokenizer_gguf import build_tokenizer, parts_from_fields
from tools.make_tiny_gguf import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    TEXT,
    USER_DEFINED,
    TinyModel,
    write_gguf,
    write_safetensors_dir,
)

MODEL = TinyModel()
REPLACEMENT = "\ufffd"
TEXTS = [
    "Hello, world",
    "  two  spaces\tand\ttabs\n\n  lines\r\n",
    "Don't can't I'LL we're",
    "12345 3.14 ½ ٣",
    "Grüße aus Zürich, 你好 世界, 😀👩‍👩‍👧, é vs e\u0301",
    "def f(x):\n    return x**2  # ok?!",
    "",
    " ",
    "a",
]

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
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors_dir(MODEL, tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(MODEL, tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def bpe(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


class TestByteTokenizer:
    def test_ids_are_utf8_bytes(self) -> None:
        assert [0x68, 0xC3, 0xA9] == ByteTokenizer().encode("hé")

    def test_end_text_is_one_token_wherever_it_stands(self) -> None:
        assert [256, 97, 256, 256, 98] == ByteTokenizer().encode("<|end|>a<|end|><|end|>b")

    def test_end_token_has_a_name_but_no_text(self) -> None:
        tokenizer = ByteTokenizer()
        assert (b"", "<|end|>", "") == (tokenizer.token_bytes(256), tokenizer.token_text(256), tokenizer.decode([256]))
        assert {256} == tokenizer.eos_token_ids

    def test_template_and_its_end_text_are_told(self) -> None:
        tokenizer = ByteTokenizer("{{ eos_token }}")
        assert ("{{ eos_token }}", "<|end|>") == (tokenizer.chat_template, tokenizer.special_token_texts["eos_token"])
        assert ByteTokenizer().chat_template is None

    @given(st.text())
    def test_decode_undoes_encode(self, text: str) -> None:
        tokenizer = ByteTokenizer()
        assert text.replace("<|end|>", "") == tokenizer.decode(tokenizer.encode(text))

    @pytest.mark.parametrize("token_id", [-1, 257, 10**6])
    def test_id_without_a_token_has_no_text(self, token_id: int) -> None:
        assert (b"", "") == (ByteTokenizer().token_bytes(token_id), ByteTokenizer().token_text(token_id))


class TestIncrementalDetokenizer:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"\xf0\x9f\x98\x80 ok", ["", "", "", "😀", " ", "o", "k"]),
            (b"\xec\x95\x88", ["", "", "안"]),
            (b"a\xc3\xa9b", ["a", "", "é", "b"]),
        ],
    )
    def test_open_character_is_held_until_it_is_whole(self, data: bytes, expected: list[str]) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer())
        assert expected == [detokenizer.decode(byte) for byte in data]
        assert (False, "") == (detokenizer.is_open, detokenizer.flush())

    @pytest.mark.parametrize("data", [b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe4", b"\xe4\xbd", b"\xc3"])
    def test_character_left_open_becomes_one_replacement_at_the_end(self, data: bytes) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer())
        assert [""] * len(data) == [detokenizer.decode(byte) for byte in data]
        assert detokenizer.is_open
        assert REPLACEMENT == detokenizer.flush()
        assert (False, "") == (detokenizer.is_open, detokenizer.flush())

    def test_bytes_that_can_be_no_character_do_not_block_what_follows(self) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer())
        assert REPLACEMENT + "a" == "".join(detokenizer.decode(byte) for byte in b"\xf0\x9fa")
        assert REPLACEMENT + "b" == "".join(detokenizer.decode(byte) for byte in b"\x80b")

    @given(st.lists(st.integers(0, 256)))
    def test_streamed_bytes_equal_the_whole_decoded_at_once(self, ids: list[int]) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer())
        whole = bytes(i for i in ids if i < 256).decode("utf-8", "replace")
        assert whole == "".join(detokenizer.decode(i) for i in ids) + detokenizer.flush()

    def test_special_token_between_the_bytes_of_a_character_does_not_break_it(self) -> None:
        assert "é" == ByteTokenizer().decode([0xC3, 256, 0xA9])


class TestByteLevelBpe:
    def test_directory_and_gguf_are_the_same_tokenizer(self, directory: Path, gguf: Path) -> None:
        a, b = load_tokenizer(directory), load_tokenizer(gguf)
        for text in [*TEXTS, TEXT, f"{BOS}hello{USER_DEFINED}{EOS}"]:
            assert a.encode(text) == b.encode(text)
        assert [a.token_bytes(i) for i in range(a.vocab_size)] == [b.token_bytes(i) for i in range(b.vocab_size)]
        for name in ("vocab_size", "bos_token_id", "adds_bos", "eos_token_ids", "chat_template", "max_token_bytes"):
            assert getattr(a, name) == getattr(b, name), name
        assert {"bos_token": BOS, "eos_token": EOS} == a.special_token_texts == b.special_token_texts

    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_are_the_packages_own_behind_one_bos(self, text: str, bpe: Tokenizer) -> None:
        expected = MODEL.tokenizer.encode(text, add_special_tokens=False).ids
        assert [bpe.bos_token_id, *expected] == bpe.encode(text)
        assert expected == bpe.encode(text, add_special_tokens=False)

    @given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
    def test_decode_undoes_encode(self, text: str) -> None:
        tokenizer = build_tokenizer(parts_from_fields(_gguf_bpe_fields("smollm")))
        assert text == tokenizer.decode(tokenizer.encode(text))

    @given(st.lists(st.integers(0, MODEL.tokenizer.get_vocab_size() - 1)))
    def test_any_ids_decode_as_the_package_decodes_them(self, ids: list[int]) -> None:
        tokenizer = build_tokenizer(parts_from_fields(_gguf_bpe_fields("smollm")))
        assert MODEL.tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)

    def test_special_tokens_are_named_but_have_no_bytes(self, bpe: Tokenizer) -> None:
        bos, tool = bpe.bos_token_id, MODEL.tokenizer.token_to_id(USER_DEFINED)
        assert bos is not None
        assert (b"", BOS) == (bpe.token_bytes(bos), bpe.token_text(bos))
        assert (USER_DEFINED.encode(), USER_DEFINED) == (bpe.token_bytes(tool), bpe.token_text(tool))

    def test_no_token_is_longer_than_said(self, bpe: Tokenizer) -> None:
        assert bpe.max_token_bytes == max(
            [len(bpe.token_bytes(i)) for i in range(bpe.vocab_size)] + [len(BOS), len(EOS)]
        )

    def test_bos_in_the_text_is_not_doubled(self, bpe: Tokenizer) -> None:
        ids = bpe.encode(BOS + "hello")
        assert bpe.encode("hello") == ids
        assert 1 == ids.count(ids[0])

    def test_padded_ids_have_no_text(self, bpe: Tokenizer) -> None:
        assert (b"", "") == (bpe.token_bytes(bpe.vocab_size), bpe.token_text(bpe.vocab_size))
        assert b"" == bpe.token_bytes(-1)

    @pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
    def test_lone_surrogate_is_an_invalid_request(self, tokenizer: str, bpe: Tokenizer) -> None:
        with pytest.raises(InvalidRequest, match="surrogate"):
            (bpe if tokenizer == "bpe" else ByteTokenizer()).encode("a\ud83db")

    def test_alphabet_gives_every_byte_its_own_character(self) -> None:
        assert set(pre_tokenizers.ByteLevel.alphabet()) == set(byte_alphabet())
        assert list(range(256)) == sorted(byte_alphabet().values())


def _gguf_bpe_fields(pre: str | None) -> dict[str, Any]:
    tokenizer = MODEL.tokenizer
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{BOS: 3, EOS: 3, USER_DEFINED: 4}.get(t, 1) for t in tokens],
        "tokenizer.ggml.merges": [" ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id(BOS),
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id(EOS),
    } | ({"tokenizer.ggml.pre": pre} if pre else {})


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
        built = HfTokenizer.from_str(parts_from_fields(_gguf_bpe_fields(pre))["json"]).pre_tokenizer
        assert self.ORIGINALS[pre].pre_tokenize_str(text) == built.pre_tokenize_str(text)

    def test_families_differ_where_they_should(self) -> None:
        def pieces(pre: str | None) -> list[str]:
            built = HfTokenizer.from_str(parts_from_fields(_gguf_bpe_fields(pre))["json"]).pre_tokenizer
            return [piece for piece, _ in built.pre_tokenize_str("1234 I'LL (x)")]

        assert ["1234", "ĠI", "'", "LL", "Ġ(", "x", ")"] == pieces("gpt-2")
        assert ["1", "2", "3", "4", "ĠI", "'", "LL", "Ġ(", "x", ")"] == pieces("smollm")
        assert ["123", "4", "ĠI", "'LL", "Ġ(", "x", ")"] == pieces("llama-bpe")
        assert ["1", "2", "3", "4", "ĠI", "'LL", "Ġ(", "x", ")"] == pieces("qwen2")
        assert ["123", "4", "ĠI", "'", "LL", "Ġ", "(", "x", ")"] == pieces("default") == pieces(None)

    def test_unknown_pre_tokenizer_is_refused_by_name(self) -> None:
        with pytest.raises(ModelLoadError, match="'chatglm-bpe' is not supported"):
            parts_from_fields(_gguf_bpe_fields("chatglm-bpe"))

    def test_llama3_files_from_before_the_flag_add_bos_and_others_do_not(self) -> None:
        assert build_tokenizer(parts_from_fields(_gguf_bpe_fields("llama-bpe"))).adds_bos
        assert not build_tokenizer(parts_from_fields(_gguf_bpe_fields("smollm"))).adds_bos
        said = _gguf_bpe_fields("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}
        assert not build_tokenizer(parts_from_fields(said)).adds_bos

    def test_llama3_takes_a_piece_that_is_a_token_whole(self) -> None:
        """Without a merge that leads to it, only ignore_merges finds it."""
        fields = _gguf_bpe_fields("llama-bpe")
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
    ],
)
def test_vocabulary_that_cannot_be_used_is_a_load_error(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        parts_from_fields(_gguf_bpe_fields("smollm") | changes)


def test_missing_gguf_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_tokenizer(tmp_path / "none.gguf")


def test_embedded_tokenizer_imports_nothing_heavy() -> None:
    """Start-up stays short: the packages are imported where they are used."""
    code = (
        "import sys, core.tokenizer, core.model.weights, core.model.config, core.model.tiny;"
        "core.tokenizer.ByteTokenizer().encode('a');"
        "print(sorted({'tokenizers', 'gguf', 'safetensors', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert "[]\n" == subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
