"""Scripts: each piece is one token, a group is one step, the rest is the real engine."""

from dataclasses import replace

import pytest

from core.errors import InvalidRequest
from core.request import FinishReason, OutputToken, ScriptedToken, ScriptEntry, TokenLogprobs
from core.scripted import RequestScript, ScriptedRunner
from core.step import ModelRunnerOutput, SampledTokens, SchedulerOutput, count_only
from core.tokenizer import ByteTokenizer
from tests.builders import END, engine, new_request, plan, request, run, text_of, token_ids_of


def script(*entries: ScriptEntry) -> RequestScript:
    return RequestScript(entries, ByteTokenizer())


@pytest.mark.parametrize("entries", [(), ("",), ("a", ()), ("a", ("b", "")), (b"",)])
def test_an_empty_script_group_or_piece_is_refused(entries: tuple[ScriptEntry, ...]):
    with pytest.raises(InvalidRequest, match="script, or a group or piece in it, is empty") as refused:
        script(*entries)
    assert "script" == refused.value.param


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(InvalidRequest, match="script holds half of a surrogate pair") as refused:
        script("a", "\ud83d")
    assert "script" == refused.value.param


def test_a_model_without_an_end_token_takes_no_script():
    endless = ByteTokenizer()
    endless.eos_token_ids = frozenset()

    with pytest.raises(InvalidRequest, match="script needs an end token behind its last piece"):
        RequestScript(["a"], endless)


def test_a_piece_that_is_a_token_of_the_vocabulary_is_that_token():
    assert [97] == list(script("a").group_at(0))


def test_any_other_piece_has_an_id_of_its_own_beyond_the_vocabulary():
    it = script("ab", b"\xff", "ab")

    assert [[257], [258], [259]] == [list(it.group_at(i)) for i in range(3)]
    assert [b"ab", b"\xff", b"ab"] == [it.token_bytes(i) for i in (257, 258, 259)]
    assert b"a" == it.token_bytes(97)


def test_a_group_is_said_from_where_it_was_left():
    it = script("a", ("b", "c", "d"), "e")

    assert ["a", "bcd", "cd", "d", "e"] == ["".join(map(chr, it.group_at(i))) for i in range(5)]


def test_behind_the_last_piece_comes_the_end_token():
    assert [[END], [END]] == [list(script("a").group_at(i)) for i in (1, 5)]


def test_scripted_requests_are_served_without_the_model_and_others_by_it():
    seen: list[SchedulerOutput] = []

    def model(it: SchedulerOutput) -> ModelRunnerOutput:
        seen.append(it)
        return ModelRunnerOutput({s.request_id: SampledTokens((7,)) for s in it.scheduled}, {"b": 1})

    scripted, plain = request("a"), request("b")
    scripted.script = script("x")
    result = ScriptedRunner(model)(plan(scripted, plain))

    assert ({"a": [120], "b": [7]}, {"b": 1}) == (
        {name: list(tokens.token_ids) for name, tokens in result.sampled.items()},
        dict(result.draft_computed),
    )
    assert [["b"]] == [[s.request_id for s in it.scheduled] for it in seen]


def test_a_plan_of_scripts_alone_gives_the_model_nothing_to_compute_but_blocks_to_move():
    seen: list[SchedulerOutput] = []

    def model(it: SchedulerOutput) -> ModelRunnerOutput:
        seen.append(it)
        return ModelRunnerOutput(tier_seconds=2.0)

    it = request("a")
    it.script = script("x")
    moves = replace(plan(it), block_copies=((1, 2),), tier_stores=((3, 0),), tier_loads=((1, 4),))
    result = ScriptedRunner(model)(moves)

    assert [replace(moves, scheduled=())] == seen
    assert (["a"], 2.0) == (list(result.sampled), result.tier_seconds)


def test_siblings_say_the_script_too():
    it = request("a", siblings=[request("b", choice=1)])
    for member in (it, *it.siblings):
        member.script = script("x")

    assert {"a": [120], "b": [120]} == {
        name: list(tokens.token_ids) for name, tokens in ScriptedRunner(count_only)(plan(it)).sampled.items()
    }


def test_a_script_is_said_piece_by_piece_and_ends():
    it = engine()
    it.add(new_request(max_tokens=20, script=["Hel", "lo", " world"]))
    outputs = run(it)["a"]

    assert ["Hel", "lo", " world", ""] == [output.text for output in outputs]
    assert (FinishReason.STOP, 4) == (outputs[-1].finish_reason, outputs[-1].num_generated_tokens)


def test_a_group_comes_in_one_step():
    it = engine()
    it.add(new_request(max_tokens=20, script=["a", ("b", "c", "d")]))

    assert ["a", "bcd", ""] == [output.text for output in run(it)["a"]]
    assert (1, 2, 2) == (it.stats.num_drafts, it.stats.num_draft_tokens, it.stats.num_accepted_tokens)


def test_a_group_without_slots_comes_in_parts():
    it = engine(max_num_batched_tokens=2)
    it.add(new_request(max_tokens=20, script=[("b", "c", "d")]))

    assert ["bc", "d", ""] == [output.text for output in run(it)["a"]]


def test_bytes_make_characters_across_pieces():
    it = engine()
    it.add(new_request(max_tokens=20, script=[b"\xf0\x9f", b"\x98\x80", "!"]))

    assert ["", "😀", "!", ""] == [output.text for output in run(it)["a"]]


def test_stops_and_length_hold_for_scripts():
    it = engine()
    it.add(new_request("stop", max_tokens=20, script=[("a", "b", "S", "TOP", "c")], stop=("STOP",)))
    it.add(new_request("length", max_tokens=2, script=["a", "b", "c"]))
    outputs = run(it)

    assert ("ab", "STOP") == (text_of(outputs["stop"]), outputs["stop"][-1].stop_reason)
    assert ("ab", FinishReason.LENGTH) == (text_of(outputs["length"]), outputs["length"][-1].finish_reason)


def test_scripts_that_ask_for_logprobs_get_zeros():
    it = engine()
    it.add(new_request(max_tokens=2, script=["a", "b"], num_logprobs=0))

    assert [OutputToken(97, "a", TokenLogprobs(0.0)), OutputToken(98, "b", TokenLogprobs(0.0))] == [
        token for output in run(it)["a"] for token in output.tokens
    ]


def test_a_piece_brings_its_logprobs_and_as_many_alternatives_as_are_asked_for():
    it = engine()
    piece = ScriptedToken("ab", -0.5, (("ab", -0.5), ("c", -1.0), (b"\xff", -2.0)))
    it.add(new_request(max_tokens=2, script=[piece, "z"], num_logprobs=2))
    first, second = [token for output in run(it)["a"] for token in output.tokens]
    logprobs = first.logprobs
    assert logprobs is not None

    assert (-0.5, [-0.5, -1.0]) == (logprobs.logprob, [value for _, value in logprobs.top])
    assert [b"ab", b"c"] == [logprobs.own_bytes.get(i, bytes([i % 256])) for i, _ in logprobs.top]
    assert b"ab" == logprobs.own_bytes[first.token_id]
    assert TokenLogprobs(0.0) == second.logprobs


def test_two_scripts_do_not_know_each_others_tokens():
    it = engine()
    it.add(new_request("a", max_tokens=9, script=["one"]))
    it.add(new_request("b", max_tokens=9, script=["two"]))
    outputs = run(it)

    assert ["one", "two"] == [text_of(outputs[name]) for name in "ab"]
    assert token_ids_of(outputs["a"]) == token_ids_of(outputs["b"]) == [257, END]


def test_a_script_survives_preemption():
    """Two scripts of eight tokens in a pool of ten slots."""
    it = engine(count_only, num_kv_blocks=10, block_size=1)
    for name in "ab":
        it.add(new_request(name, max_tokens=9, script=list("abcdefgh")))
    outputs = run(it)

    assert it.stats.num_preemptions > 0
    assert ["abcdefgh"] * 2 == [text_of(outputs[name]) for name in "ab"]
