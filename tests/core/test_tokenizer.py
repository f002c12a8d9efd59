"""Tokenizers: ids and bytes agree with the package `tokenizers`, and streamed text is the whole text, cut anywhere."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from core.tokenizer import ByteTokenizer, IncrementalDetokenizer, Tokenizer, load_tokenizer
from core.tokenizer_gguf import build_tokenizer, parts_from_fields
from tests.core.vocabularies import MODEL, TEXTS, gguf_bpe_fields
from tools.make_tiny_gguf import BOS, EOS, TEXT, USER_DEFINED, write_gguf, write_safetensors_dir

REPLACEMENT = "\ufffd"


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

    @pytest.mark.parametrize(("before", "text"), [(b"a\xf0\x9f", "😀"), (b"\xf0", "\ufffd"), (b"a", "\ufffd" * 2)])
    def test_a_character_that_was_begun_before_is_gone_on_with(self, before: bytes, text: str) -> None:
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), behind=before)
        assert text == "".join(detokenizer.decode(byte) for byte in b"\x98\x80") + detokenizer.flush()

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
        tokenizer = build_tokenizer(parts_from_fields(gguf_bpe_fields("smollm")))
        assert text == tokenizer.decode(tokenizer.encode(text))

    @given(st.lists(st.integers(0, MODEL.tokenizer.get_vocab_size() - 1)))
    def test_any_ids_decode_as_the_package_decodes_them(self, ids: list[int]) -> None:
        tokenizer = build_tokenizer(parts_from_fields(gguf_bpe_fields("smollm")))
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


def test_embedded_tokenizer_imports_nothing_heavy() -> None:
    """Start-up stays short: the packages are imported where they are used."""
    code = (
        "import sys, core.tokenizer, core.model.weights, core.model.config, core.model.tiny;"
        "core.tokenizer.ByteTokenizer().encode('a');"
        "print(sorted({'tokenizers', 'gguf', 'safetensors', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert "[]\n" == subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
