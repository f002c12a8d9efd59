"""A small vocabulary of byte-level BPE, as a GGUF has it, and texts that are hard to cut."""

import json
from typing import Any

from tools.make_tiny_gguf import BOS, EOS, USER_DEFINED, TinyModel

MODEL = TinyModel()
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


def gguf_bpe_fields(pre: str | None) -> dict[str, Any]:
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
