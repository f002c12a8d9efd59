"""What the server says about the run: its /metrics read before and after, and the difference.

Names are vLLM's, plus Octavo's for KV blocks, so any server that exports some of them is understood. A series that
is not there is reported as absent, never as 0; neither is a counter that went backwards (the server restarted).
"""

from dataclasses import dataclass, fields

import httpx
from prometheus_client.parser import text_string_to_metric_families

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
KV_BLOCKS = "octavo:kv_blocks"
KV_BLOCKS_FREE = "octavo:kv_blocks_free"

SCRAPE_TIMEOUT_S = 10.0

# Sample name -> value, summed over label sets (engines, models).
Scrape = dict[str, float]


@dataclass(frozen=True)
class ServerMetrics:
    """None is absent: the server does not export it, or answered no scrape."""

    num_drafts: float | None
    num_draft_tokens: float | None
    num_accepted_tokens: float | None
    num_preemptions: float | None
    kv_blocks: float | None
    kv_blocks_free_before: float | None
    kv_blocks_free_after: float | None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted over the run; None also when nothing was drafted."""
        if not self.num_draft_tokens or self.num_accepted_tokens is None:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a step that had drafts, the bonus token among them: 1 + accepted / drafts. None as above."""
        if not self.num_drafts or self.num_accepted_tokens is None:
            return None
        return 1 + self.num_accepted_tokens / self.num_drafts

    @property
    def is_absent(self) -> bool:
        return all(getattr(self, field.name) is None for field in fields(self))


def parse_scrape(text: str) -> Scrape:
    """Raises ValueError when the text is not the Prometheus exposition format."""
    scrape: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            scrape[sample.name] = scrape.get(sample.name, 0.0) + sample.value
    return scrape


async def scrape_server(http: httpx.AsyncClient) -> Scrape:
    """All samples of GET /metrics; empty when the server has none that can be read."""
    try:
        response = await http.get("/metrics", timeout=SCRAPE_TIMEOUT_S)
        return parse_scrape(response.text) if response.status_code == httpx.codes.OK else {}
    except (httpx.HTTPError, ValueError):
        return {}


def compare(before: Scrape, after: Scrape) -> ServerMetrics:
    return ServerMetrics(
        num_drafts=_increase(DRAFTS, before, after),
        num_draft_tokens=_increase(DRAFT_TOKENS, before, after),
        num_accepted_tokens=_increase(ACCEPTED_TOKENS, before, after),
        num_preemptions=_increase(PREEMPTIONS, before, after),
        kv_blocks=after.get(KV_BLOCKS),
        kv_blocks_free_before=before.get(KV_BLOCKS_FREE),
        kv_blocks_free_after=after.get(KV_BLOCKS_FREE),
    )


def _increase(name: str, before: Scrape, after: Scrape) -> float | None:
    if name not in before or name not in after or after[name] < before[name]:
        return None
    return after[name] - before[name]
