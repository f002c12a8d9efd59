"""Log-probabilities in the shapes of OpenAI's two endpoints, and the prompt's in vLLM's.

A token goes by its text, or by its id where the client asked for that (`return_tokens_as_token_ids`): texts are not
unique, since a token may be part of a character, and clients that count on ids need them told apart.
"""

from collections.abc import Sequence
from typing import Any

from app.schemas.chat import ChatLogprobs, TokenLogprob, TopLogprob
from app.schemas.completions import CompletionLogprobs
from app.schemas.generation import PromptLogprob, PromptLogprobs
from core import OutputToken, Tokenizer, TokenLogprobs


class LogprobsWriter:
    """Writes one request's.

    Args:
        num_top: most alternatives to show; the engine may have been asked for more.
        names_ids: tokens go by `token_id:17`.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_top: int, names_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._names_ids = names_ids

    def completion(self, tokens: Sequence[OutputToken], offset: int) -> CompletionLogprobs:
        """The four lists; the first token's text starts at `offset`. A token without a law (a prompt's first): null."""
        lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            lists.tokens.append(self._name(token.token_id, token.text))
            lists.token_logprobs.append(token.logprobs.logprob if token.logprobs else None)
            lists.top_logprobs.append(self._alternatives(token, token.logprobs) if token.logprobs else None)
            lists.text_offset.append(offset)
            offset += len(token.text)
        return lists

    def _alternatives(self, token: OutputToken, logprobs: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in logprobs.top[: self._num_top]:
            if token_id != token.token_id:  # of two with one name the likelier stays
                found.setdefault(self._name(token_id, self._text(token_id, logprobs)), logprob)
        # Under its own name, so that looking up a token among its alternatives always finds it.
        found[self._name(token.token_id, token.text)] = logprobs.logprob
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def chat(self, tokens: Sequence[OutputToken]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._chat_token(token) for token in tokens], refusal=None)

    def _chat_token(self, token: OutputToken) -> TokenLogprob:
        logprobs = token.logprobs
        assert logprobs is not None
        return TokenLogprob(
            **self._described(token.token_id, logprobs),
            logprob=logprobs.logprob,
            top_logprobs=[
                TopLogprob(**self._described(token_id, logprobs), logprob=logprob)
                for token_id, logprob in logprobs.top[: self._num_top]
            ],
        )

    def _described(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        data = logprobs.own_bytes.get(token_id) or self._tokenizer.token_bytes(token_id)
        return {"token": self._name(token_id, self._text(token_id, logprobs)), "bytes": list(data)}

    def _text(self, token_id: int, logprobs: TokenLogprobs) -> str:
        """A token for display; a scripted one may lie outside the vocabulary."""
        own = logprobs.own_bytes.get(token_id)
        return self._tokenizer.token_text(token_id) if own is None else own.decode("utf-8", "replace")

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._names_ids else text


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The lists one behind the other; what is in them is shared."""
    return CompletionLogprobs.model_construct(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], found: Sequence[TokenLogprobs], num_top: int
) -> PromptLogprobs:
    """vLLM's shape: a dict by token id for each token of the prompt, its own entry first; null for the first token."""
    scored = zip(token_ids[1:], found, strict=True)
    return [None, *(_prompt_entries(tokenizer, token_id, logprobs, num_top) for token_id, logprobs in scored)]


def _prompt_entries(
    tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs, num_top: int
) -> dict[str, PromptLogprob]:
    ranked = [(token_id, logprobs.logprob, logprobs.rank)]
    ranked += [(id_, logprob, rank) for rank, (id_, logprob) in enumerate(logprobs.top[:num_top], 1) if id_ != token_id]
    return {
        str(id_): PromptLogprob(logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(id_))
        for id_, logprob, rank in ranked
    }
