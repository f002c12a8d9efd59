"""What a request's output may be: a JSON schema, a regular expression, some choices or a grammar, as masks over tokens.

The parsing is llguidance's (https://github.com/guidance-ai/llguidance, an Earley parser over derivatives of regular
expressions). It sees tokens as bytes, as `Tokenizer.token_bytes` has them, so one bridge serves every tokenizer. A
mask allows each token whose bytes some text of the grammar goes on with, however that text would have been cut into
tokens, and an end token where the text may end.

A `Constraint` answers for token ids and remembers only to be quick: whoever asks about other ids than the last ones,
since drafts were refused or a sibling went another way, gets what a new one would say.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from core.decoding.grammar_trial import TokenTable, Trial, compile_grammar, make_bridge
from core.decoding.json_schemas import check_regex, lark_json, refusal
from core.errors import InvalidRequest, NothingAllowed
from core.sampling_params import StructuredOutput
from core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 128  # grammars kept for the next request that asks for the same
MAX_KEPT_MASKS = 64  # per request: more than a step's drafts, of which draft model and target both ask
MAX_GRAMMAR_BYTES = 2**16
MAX_ERROR_LENGTH = 400


class Grammar:
    """A compiled grammar, shared by the requests that ask for it."""

    def __init__(self, template: "LLMatcher", end_bits: int) -> None:
        self._template = template
        self._end_bits = end_bits

    def constraint(self) -> "Constraint":
        """For one request, whose output has not begun."""
        return Constraint(self._template, self._end_bits)


class Constraint:
    """One request's grammar. Not for several threads."""

    def __init__(self, template: "LLMatcher", end_bits: int) -> None:
        self._template = template
        self._end_bits = end_bits
        self._matcher = template.deep_copy()
        self._token_ids: list[int] = []  # what the matcher has read
        self._masks: OrderedDict[int, bytes] = OrderedDict()  # behind so many of them

    def allowed(self, token_ids: Sequence[int]) -> bytes:
        """Which tokens may come behind this output: token i is bit i % 8 of byte i // 8.

        Behind ids that the grammar forbids stands what is allowed in the first forbidden one's place.

        Raises:
            NothingAllowed: the parser has reached its limits, or no token can go on.
        """
        num_same = self._num_read(token_ids)
        if num_same == len(token_ids) and (known := self._masks.get(num_same)) is not None:
            return known
        self._forget_behind(num_same)
        self._read(token_ids[num_same:])
        mask = self._masks.get(len(self._token_ids)) or self._matcher.compute_bitmask()
        self._raise_if_failed()
        self._masks[len(self._token_ids)] = mask
        if len(self._masks) > MAX_KEPT_MASKS:
            self._masks.popitem(last=False)
        return mask

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing but an end may come behind this output. A fault is told by `allowed`, not here."""
        try:
            return not int.from_bytes(self.allowed(token_ids), "little") & ~self._end_bits
        except NothingAllowed:
            return False

    def num_allowed(self, token_ids: Sequence[int], draft: Sequence[int]) -> int:
        """How many of the draft's tokens, one after the other, the grammar allows behind this output."""
        self._forget_behind(self._num_read(token_ids))
        self._read(token_ids[len(self._token_ids) :])
        num = self._matcher.validate_tokens(list(draft))
        self._raise_if_failed()
        return num

    def _num_read(self, token_ids: Sequence[int]) -> int:
        """Length of what the matcher has read and `token_ids` begins with."""
        pairs = zip(self._token_ids, token_ids, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._token_ids), len(token_ids)))

    def _forget_behind(self, num: int) -> None:
        if num == len(self._token_ids):
            return
        self._matcher.rollback(len(self._token_ids) - num)
        del self._token_ids[num:]
        self._masks = OrderedDict((n, mask) for n, mask in self._masks.items() if n <= num)

    def _read(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            num = self._matcher.try_consume_tokens(list(token_ids))
            self._raise_if_failed()
            self._token_ids += token_ids[:num]

    def _raise_if_failed(self) -> None:
        """A matcher that has failed says nothing any more; the next question begins with a new one."""
        if self._matcher.is_error():
            error = self._matcher.get_error().splitlines()[0]
            self._matcher = self._template.deep_copy()
            self._token_ids, self._masks = [], OrderedDict()
            raise NothingAllowed(f"the grammar cannot be followed any further: {error}")


class GrammarCompiler:
    """Compiles for one tokenizer, within limits, and keeps what it compiled last. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._idle_trials: list[Trial] = []
        self._outcome = lru_cache(MAX_COMPILED)(self._compile)

    def compile(self, wanted: StructuredOutput) -> Grammar:
        """Raises InvalidRequest for what cannot be honoured, or not within the limits."""
        outcome = self._outcome(wanted)
        if isinstance(outcome, str):
            raise InvalidRequest(outcome, "structured_output")
        return outcome

    def _compile(self, wanted: StructuredOutput) -> Grammar | str:
        """The grammar, or why there is none: a refusal is kept too, for whoever is refused may ask again and again."""
        try:
            lark = lark_of(wanted)
        except InvalidRequest as refusal:
            return str(refusal)
        error = self._try_out(lark)
        if not error:
            template, error = compile_grammar(self._bridge, lark)
        if error:
            return f"{wanted.kind} cannot be honoured: {_readable(error, wanted)}"
        return Grammar(template, sum(1 << token_id for token_id in self._bridge.eos_tokens))

    def _try_out(self, lark: str) -> str:
        """What the trial says is wrong with it. Each thread that comes at the same time gets a trial of its own."""
        try:
            trial = self._idle_trials.pop()
        except IndexError:
            trial = Trial(self._table)
        error = trial.error_of(lark)
        if not trial.is_over:
            self._idle_trials.append(trial)
        return error

    @cached_property
    def _table(self) -> TokenTable:
        """The tokenizer's tokens as bytes; special ones by their names, by which a grammar can ask for them."""
        tokenizer = self._tokenizer
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        special = [i for i, data in enumerate(tokens) if not data and tokenizer.token_text(i)]
        for token_id in special:
            tokens[token_id] = tokenizer.token_text(token_id).encode()
        ends = sorted(i for i in tokenizer.eos_token_ids if i < tokenizer.vocab_size)
        if not ends:  # llguidance needs one: beyond the vocabulary, where no model can say it
            ends = [len(tokens)]
            tokens.append(b"<end>")
            special += ends
        return tokens, special, ends

    @cached_property
    def _bridge(self) -> "LLTokenizer":
        return make_bridge(self._table)


def lark_of(wanted: StructuredOutput) -> str:
    """The same in llguidance's variant of Lark. Raises InvalidRequest for what is too long, too deep or no schema."""
    from llguidance import regex_to_lark

    value = wanted.value
    _check_text(wanted.kind, value if isinstance(value, str) else "".join(value))
    if wanted.kind == "choice":
        if not value:
            raise refusal("choice is an empty list")
        return f"start: {' | '.join(map(_quoted, value))}"
    assert isinstance(value, str)
    if wanted.kind == "grammar":
        return value
    if wanted.kind == "regex":
        check_regex("regex", value)
        return f"start: /{regex_to_lark(value, '')}/"
    return f"start: {lark_json({'type': 'object'} if wanted.kind == 'json_object' else _schema(value))}"


def _quoted(text: str) -> str:
    """A text as Lark has it: as JSON has it, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_text(kind: str, text: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise refusal(f"{kind} holds half of a surrogate pair, which is no character") from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise refusal(f"{kind} has {num_bytes} bytes, limit is {MAX_GRAMMAR_BYTES}")


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(f"json_schema cannot be read: {error}") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise refusal("json_schema must be an object")
    return schema


def _readable(error: str, wanted: StructuredOutput) -> str:
    """The parser's message without the excerpt of the grammar behind it: what we wrote there is not the caller's."""
    lines = error.partition("\n<")[0].splitlines()
    text = " ".join(line.strip() for line in lines if not re.match(r" *[0-9]+ \||[ ^]*$", line))
    if wanted.kind != "grammar":  # of the others the caller has seen no lines
        text = re.sub(r"^(at )?[0-9]+\([0-9]+\): (failed to compile JSON schema: )?", "", text)
    return text.replace("NoExtensionBias", "no text keeps to it")[:MAX_ERROR_LENGTH]
