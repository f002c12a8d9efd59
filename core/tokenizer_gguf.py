"""Tokenizers from GGUF metadata: the vocabulary is there, how text is split before it is only named.

Two kinds. `gpt2` is byte-level BPE with merges and the name of a pre-tokenizer, whose regular expressions stand in the
table below; a name that is not there is refused, since a near miss tokenizes almost right. `llama` is SentencePiece:
pieces with scores, from which the merges follow. Building either takes seconds for a real vocabulary, most of it
reading the metadata, so the result may be kept for the next start (as weights are, see `core.model.gguf`).
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from core.errors import ModelLoadError
from core.model.gguf import cache_file, gguf_fields, open_gguf, write_cache
from core.tokenizer_files import META_SPACE, VocabularyTokenizer

logger = logging.getLogger(__name__)

# gguf.TokenType
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0")

# Expressions by which text is split, one after the other, each match and each gap a piece of its own. The names and
# what they stand for: llama.cpp, src/llama-vocab.cpp.
_SPLITS: dict[str, tuple[str, ...]] = (
    dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "trillion"), (_WORDS,))
    | dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _WORDS)
    )
    | dict.fromkeys(_LLAMA3, (_ANY_CASE + r"\p{N}{1,3}" + _REST,))
    | dict.fromkeys(("dbrx", "smaug-bpe"), (_ANY_CASE + r"\p{N}{1,3}" + _REST,))
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_ANY_CASE + r"\p{N}" + _REST,))
    | {"tekken": (_TEKKEN,), "deepseek-coder": _CODER}
    | {"default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")}
)
# Of these a piece that is itself a token is not merged up to, and BOS comes first unless the file says otherwise.
_WHOLE_WORDS_AND_BOS = (*_LLAMA3, "tekken")

# Control tokens that end a turn in some model's template, whether or not the file names them as its end.
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>"}
)


def load_gguf_tokenizer(path: Path, *, cache_dir: Path | None = None) -> VocabularyTokenizer:
    """The tokenizer that a GGUF file describes; see `core.tokenizer.load_tokenizer`."""
    if not path.exists():
        raise ModelLoadError(f"{path} does not exist")
    if cache_dir is None:
        return build_tokenizer(_read_parts(path))
    kept = cache_file(path, cache_dir, "tokenizer.json")
    if kept.exists():
        try:
            return build_tokenizer(json.loads(kept.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, ModelLoadError) as error:
            logger.warning("converted tokenizer is damaged and made anew: %s", error)
    parts = _read_parts(path)
    write_cache(kept, lambda temporary: temporary.write_text(json.dumps(parts), encoding="utf-8"))
    return build_tokenizer(parts)


def build_tokenizer(parts: Mapping[str, Any]) -> VocabularyTokenizer:
    """A tokenizer from what `parts_from_fields` gives; `json` is the package's own form."""
    try:
        tokenizer = HfTokenizer.from_str(parts["json"])
    except Exception as error:  # the package raises the base class
        raise ModelLoadError(f"tokenizer cannot be read: {error}") from error
    return VocabularyTokenizer(
        tokenizer,
        bos_token_id=parts["bos_token_id"],
        adds_bos=parts["adds_bos"],
        eos_token_ids=frozenset(parts["eos_token_ids"]),
        chat_template=parts["chat_template"],
        special_token_texts=parts["special_token_texts"],
    )


def parts_from_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a VocabularyTokenizer, as JSON values, from GGUF metadata. Raises ModelLoadError."""
    ggml = {k.removeprefix("tokenizer.ggml."): v for k, v in fields.items() if k.startswith("tokenizer.ggml.")}
    kind = ggml.get("model")
    if "tokens" not in ggml or kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"tokenizer.ggml.model {kind!r} is not supported, supported are 'gpt2' and 'llama'")
    for name in ("tokens", "token_type", "scores", "merges"):
        if not isinstance(ggml.get(name, []), list):
            raise ModelLoadError(f"tokenizer.ggml.{name} is {ggml[name]!r}, an array is needed")
    ggml |= _without_padding(ggml)
    tokens: list[str] = ggml["tokens"]
    ids = _special_ids(ggml, kind)
    try:
        tokenizer = _byte_level_bpe(ggml) if kind == "gpt2" else _sentencepiece(ggml)
    except ModelLoadError:
        raise
    except Exception as error:  # the package raises the base class
        raise ModelLoadError(f"vocabulary is damaged: {error}") from error
    types = _token_types(ggml, {ids["bos"], ids["eos"]})
    _add_tokens(tokenizer, tokens, types)
    adds_bos = kind == "llama" or ggml.get("pre") in _WHOLE_WORDS_AND_BOS
    named = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    template = fields.get("tokenizer.chat_template")
    return {
        "json": tokenizer.to_str(),
        "bos_token_id": ids["bos"],
        "adds_bos": bool(ggml.get("add_bos_token", adds_bos)),
        "eos_token_ids": sorted(_eos_token_ids(ggml, ids["eos"], types)),
        "chat_template": template if isinstance(template, str) else None,
        "special_token_texts": {f"{name}_token": text for name, text in named.items()},
    }


def _read_parts(path: Path) -> dict[str, Any]:
    reader = open_gguf(path)
    try:
        return parts_from_fields(gguf_fields(reader))
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _special_ids(ggml: Mapping[str, Any], kind: str) -> dict[str, int | None]:
    """Ids of the named special tokens; SentencePiece's are fixed where the file is silent."""
    bos, eos, unk = (1, 2, 0) if kind == "llama" else (None, None, None)
    return {
        "bos": _token_id(ggml, "bos_token_id", bos),
        "eos": _token_id(ggml, "eos_token_id", eos),
        "unk": _token_id(ggml, "unknown_token_id", unk),
        "pad": _token_id(ggml, "padding_token_id"),
    }


def _token_id(ggml: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """An id that the file names; one without a token (-1, or what that is unsigned) is as good as none."""
    said = ggml.get(name)
    if said is not None and type(said) is not int:
        raise ModelLoadError(f"tokenizer.ggml.{name} is {said!r}, a whole number is needed")
    return said if said is not None and 0 <= said < len(ggml["tokens"]) else default


def _without_padding(ggml: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Tokens, types and scores up to the last token that is one: converters fill up to the model's own vocabulary."""
    types = ggml.get("token_type", [])
    num = len(types)
    while num and types[num - 1] == _UNUSED:
        num -= 1
    names = ("tokens", "token_type", "scores")
    return {name: ggml[name][:num] for name in names if name in ggml} if num < len(types) else {}


def _token_types(ggml: Mapping[str, Any], named_ids: set[int | None]) -> list[int]:
    """Types as they are meant: what is named as begin or end, or ends a turn, is control, even if said to be text.

    A file that tells no types has at least the tokens that it names.
    """
    tokens, told = ggml["tokens"], ggml.get("token_type")
    if not told:
        return [_CONTROL if i in named_ids else _NORMAL for i in range(len(tokens))]
    pairs = enumerate(zip(tokens, told, strict=False))
    return [
        _CONTROL if kind == _USER_DEFINED and (i in named_ids or text in _END_TEXTS) else kind
        for i, (text, kind) in pairs
    ]


def _eos_token_ids(ggml: Mapping[str, Any], eos: int | None, types: list[int]) -> set[int]:
    ids = {i for i in (eos, *(_token_id(ggml, f"{name}_token_id") for name in ("eot", "eom"))) if i is not None}
    ids.update(
        i
        for i, (text, kind) in enumerate(zip(ggml["tokens"], types, strict=False))
        if kind == _CONTROL and text in _END_TEXTS
    )
    return ids


def _byte_level_bpe(ggml: Mapping[str, Any]) -> HfTokenizer:
    pre = ggml.get("pre") or "default"
    if pre not in _SPLITS:
        raise ModelLoadError(f"pre-tokenizer {pre!r} is not supported, supported are {', '.join(sorted(_SPLITS))}")
    vocabulary = {token: i for i, token in enumerate(ggml["tokens"])}
    # A token may itself begin with a space, so the separator is looked for from the second character on.
    merges = [(m[: m.index(" ", 1)], m[m.index(" ", 1) + 1 :]) for m in ggml.get("merges", ())]
    tokenizer = HfTokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_AND_BOS))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _SPLITS[pre]]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, alphabet])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(ggml: Mapping[str, Any]) -> HfTokenizer:
    """SentencePiece's BPE: of all neighbours whose join is a piece, the best score is merged first."""
    tokens: list[str] = ggml["tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[ggml.get("unknown_token_id", 0)]
    model = models.BPE(vocabulary, _merges_by_score(ggml), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = HfTokenizer(model)
    spaces = normalizers.Replace(" ", META_SPACE)
    back = [decoders.Replace(META_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if ggml.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(META_SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _merges_by_score(ggml: Mapping[str, Any]) -> list[tuple[str, str]]:
    types = ggml.get("token_type") or [_NORMAL] * len(ggml["tokens"])
    scores = {t: s for t, s, kind in zip(ggml["tokens"], ggml["scores"], types, strict=True) if kind == _NORMAL}
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in merges]


def _add_tokens(tokenizer: HfTokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found in the text before anything is split."""
    for text, kind in zip(tokens, types, strict=False):
        if kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=False)])
