import pytest

from loadgen.client import open_http
from loadgen.server_metrics import ServerMetrics, compare, parse_scrape, scrape_server
from tests.loadgen.stubs import ScriptedServer, serve

ABSENT = ServerMetrics(None, None, None, None, None, None, None)


def exposition(drafted, accepted, free, *, preemptions=0):
    return f"""# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafted / 4}
# HELP vllm:spec_decode_num_draft_tokens_total Draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a b"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0"}} {preemptions}
vllm:num_preemptions_total{{engine="1"}} 1.0
# TYPE octavo:kv_blocks gauge
octavo:kv_blocks{{engine="0"}} 128
# TYPE octavo:kv_blocks_free gauge
octavo:kv_blocks_free{{engine="0"}} {free}
"""


def test_counters_count_from_the_scrape_before_and_gauges_are_what_they_are():
    before, after = exposition(100, 50, 128), exposition(300, 200, 120, preemptions=2)
    metrics = compare(parse_scrape(before), parse_scrape(after))

    assert ServerMetrics(50, 200, 150, 2, 128, 128, 120) == metrics
    assert 0.75 == metrics.acceptance_rate
    assert 1 + 150 / 50 == metrics.acceptance_length


def test_a_series_is_summed_over_its_labels():
    assert 4.0 == parse_scrape(exposition(0, 0, 0, preemptions=3))["vllm:num_preemptions_total"]


def test_what_is_not_exported_is_absent_and_not_zero():
    metrics = compare({"octavo:kv_blocks_free": 5.0}, {"octavo:kv_blocks_free": 4.0})

    assert ServerMetrics(None, None, None, None, None, 5.0, 4.0) == metrics
    assert (None, None) == (metrics.acceptance_rate, metrics.acceptance_length)
    assert not metrics.is_absent
    assert compare({}, {}).is_absent


def test_without_drafts_there_is_neither_acceptance_rate_nor_length():
    same = parse_scrape(exposition(100, 50, 128))

    assert (None, None) == (compare(same, same).acceptance_rate, compare(same, same).acceptance_length)
    assert 0 == compare(same, same).num_draft_tokens


def test_counters_that_went_back_belong_to_another_process():
    metrics = compare(parse_scrape(exposition(100, 50, 128)), parse_scrape(exposition(10, 5, 128)))

    assert (None, None) == (metrics.num_draft_tokens, metrics.num_accepted_tokens)


@pytest.mark.parametrize("answers", [[], ["}{ no exposition"]], ids=["404", "something else"])
async def test_a_server_without_readable_metrics_has_none(answers):
    async with serve(ScriptedServer(lambda body: [], metrics=iter(answers))) as url, open_http(url, {}) as http:
        assert {} == await scrape_server(http)
    assert ABSENT == compare({}, {})


async def test_a_server_that_is_gone_has_no_metrics():
    async with serve(ScriptedServer(lambda body: [])) as url:
        pass
    async with open_http(url, {}) as http:
        assert {} == await scrape_server(http)
