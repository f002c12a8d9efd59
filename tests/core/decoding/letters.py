"""Small vocabularies whose tokens are a few letters, and what a finite language allows in them, by the definition."""

from collections.abc import Collection, Sequence

from core.tokenizer import ByteTokenizer


class Letters(ByteTokenizer):
    """Tokens are these texts; the empty one is the end."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self._texts = texts
        self.vocab_size = len(texts)
        self.eos_token_ids = frozenset({texts.index("")})

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts[token_id].encode()

    def token_text(self, token_id: int) -> str:
        return self._texts[token_id] or self.END_TEXT

    def allowed(self, language: Collection[str], output: Sequence[int]) -> set[int]:
        """Tokens with which some text of the language goes on, and the end where one is whole, or has been."""
        if self.eos_token_ids & set(output):
            return set(self.eos_token_ids)
        said = "".join(self._texts[token_id] for token_id in output)
        going_on = {
            i for i, text in enumerate(self._texts) if text and any(t.startswith(said + text) for t in language)
        }
        return going_on | (self.eos_token_ids if said in language else frozenset())
