"""From outputs back to choices: deltas become wholes, and of several samples the best are shown."""

from app.run import merge, most_likely
from core import FinishReason, OutputToken, RequestOutput, TokenLogprobs


def test_the_most_likely_samples_are_those_of_the_highest_mean_a_token():
    """The longest has the lowest sum and yet the best mean."""

    def sample(name: str, *logprobs: float) -> RequestOutput:
        tokens = tuple(OutputToken(1, "", TokenLogprobs(logprob)) for logprob in logprobs)
        return RequestOutput(name, name, tokens, 1, 0, len(tokens), FinishReason.STOP)

    samples = [sample("poor", -3.0), sample("long", -1.0, -1.0, -1.5), sample("fair", -2.0)]

    assert ["long", "fair"] == [best.request_id for best in most_likely(samples, 2)]


def test_merged_deltas_are_the_whole():
    parts = [
        RequestOutput("r", "He", (OutputToken(1, "He"),), 5, 2, 1),
        RequestOutput("r", "", (), 5, 2, 2),
        RequestOutput("r", "y", (OutputToken(2, ""), OutputToken(3, "y")), 5, 2, 3, FinishReason.STOP, "x"),
    ]
    tokens = (OutputToken(1, "He"), OutputToken(2, ""), OutputToken(3, "y"))

    assert RequestOutput("r", "Hey", tokens, 5, 2, 3, FinishReason.STOP, "x") == merge(parts)
