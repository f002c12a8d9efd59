"""Places, requests a minute and tokens a minute: each owner has its own, and is told when to come back."""

from typing import Any

import pytest

from app.errors import ApiError
from app.shares import Allowance, Shares
from tests.app.servers import in_process
from tests.builders import Clock


def refused(shares: Shares, owner: str | None = "alice") -> tuple[str, str] | None:
    """What ran out, and in how many seconds to come back."""
    try:
        shares.refuse_beyond(owner, num_in_flight=0, num_new=1)
    except ApiError as error:
        return error.kind, error.headers["Retry-After"]
    return None


def test_a_minutes_worth_may_be_taken_at_once_and_then_flows_in_evenly():
    clock = Clock()
    allowance = Allowance(6, clock)
    for _ in range(6):
        assert 0 == allowance.wait_s("alice")
        allowance.take("alice", 1)

    assert [10, 0] == [allowance.wait_s("alice"), allowance.wait_s("bob")]
    clock.now_s += 7
    assert 3 == pytest.approx(allowance.wait_s("alice"))
    clock.now_s += 3
    assert 0 == pytest.approx(allowance.wait_s("alice"))


def test_no_more_than_a_minutes_worth_is_saved_up():
    clock = Clock()
    allowance = Allowance(6, clock)
    allowance.take("alice", 1)
    clock.now_s += 10_000
    allowance.take("alice", 6)

    assert 10 == allowance.wait_s("alice")


def test_who_took_more_than_there_was_waits_until_the_debt_is_gone():
    clock = Clock()
    shares = Shares(tokens_per_minute=60, clock=clock)
    assert refused(shares) is None
    shares.has_ended("alice", num_tokens=160)

    assert ("tokens", "101") == refused(shares)
    clock.now_s += 100.5
    assert ("tokens", "1") == refused(shares)
    clock.now_s += 0.5
    assert refused(shares) is None


def test_each_owner_has_its_own_and_each_refusal_is_counted_by_its_limit():
    shares = Shares(places=1, requests_per_minute=1, tokens_per_minute=1, clock=Clock())
    shares.has_begun("alice")
    shares.has_ended("bob", num_tokens=1)

    assert [("requests", "60"), ("tokens", "60"), None] == [refused(shares, name) for name in ("alice", "bob", None)]
    with pytest.raises(ApiError, match="requests in flight are 1, limit is 1"):
        shares.refuse_beyond("carol", num_in_flight=1, num_new=1)
    assert [1, 1, 1] == list(shares.num_refused.values())


@pytest.mark.parametrize(
    ("flag", "per_minute", "kind"),
    [("requests_per_minute_per_key", 2, "requests"), ("tokens_per_minute_per_key", 7, "tokens")],
)
async def test_a_key_that_has_had_its_minutes_worth_is_refused_and_nobody_else(flag: str, per_minute: int, kind: str):
    """Of tokens, the prompt's three and the output's one are had twice: the third request is the first without any."""
    fields: dict[str, Any] = {"api_key": ("alice:a", "bob:b"), flag: per_minute}
    async with in_process(**fields) as server:
        answers = [
            await server.client.post(
                "/v1/completions", json={"prompt": "abc", "max_tokens": 1}, headers={"X-Api-Key": key}
            )
            for key in "aaab"
        ]
        found = await server.metrics()

    assert [200, 200, 429, 200] == [answer.status_code for answer in answers]
    error = answers[2].json()["error"]
    assert (kind, "rate_limit_exceeded") == (error["type"], error["code"])
    assert f"for key 'alice': limit is {per_minute} {kind} per minute" in error["message"]
    assert 0 < int(answers[2].headers["retry-after"]) <= 60
    assert 1 == found[f"vllm:admission_rejections_total{{reason={flag}}}"]
