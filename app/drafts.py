"""What a client says about drafts, and is told of them: OpenAI's `prediction`, vLLM's `metrics.speculative_decoding`.

Each step's output carries what became of its drafts (`core.DraftOutcome`); here they are added up, over a request for
usage and over a sequence for its metrics. The fields are those of vLLM's per-request acceptance metrics.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from app.schemas.generation import CompletionTokensDetails, Prediction, SpeculativeDecodingMetrics
from core import DraftOutcome, InvalidRequest

TEXT_PARTS = ("text", "input_text", "output_text")  # no set: a body may have a list there, which has no hash


def joined_text(content: str | Sequence[dict[str, Any]] | None, where: str) -> str:
    """A content's text: a string, or text parts joined with a newline. `where` is its place in the body."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.get("text")
        if part.get("type") not in TEXT_PARTS or not isinstance(text, str):
            raise InvalidRequest(
                f"{where} has a part of type {str(part.get('type'))[:32]!r}, this model takes text parts",
                where.partition("[")[0].partition(".")[0],
            )
        texts.append(text)
    return "\n".join(texts)


def predicted_text(prediction: Prediction | None) -> str | None:
    """What a body expects to be said. Raises InvalidRequest for parts that are no text."""
    return None if prediction is None else joined_text(prediction.content, "prediction.content")


class DraftTally:
    """What became of the drafts of one HTTP request's sequences so far."""

    def __init__(self) -> None:
        self._num_accepted_predicted = self._num_rejected_predicted = 0
        self._outcomes: list[DraftOutcome] = []

    def add(self, outcome: DraftOutcome, *, is_kept: bool) -> None:
        """Count one step's drafts of one sequence; `is_kept`: for `metrics`, too."""
        if outcome.is_predicted:
            self._num_accepted_predicted += outcome.num_drafts_emitted
            self._num_rejected_predicted += outcome.num_drafted - outcome.num_drafts_emitted
        if is_kept:
            self._outcomes.append(outcome)

    def prediction_details(self) -> CompletionTokensDetails:
        """Tokens taken from the prediction as drafts: those in the output, and those that are not."""
        return CompletionTokensDetails(
            accepted_prediction_tokens=self._num_accepted_predicted,
            rejected_prediction_tokens=self._num_rejected_predicted,
        )

    def summary(self, num_spec_tokens: int, *, is_detailed: bool) -> SpeculativeDecodingMetrics:
        """The steps that had drafts, as vLLM describes them. Accepted is what `/metrics` counts as accepted."""
        pairs = [(outcome.num_drafted, outcome.num_gained) for outcome in self._outcomes]
        drafted, gained = [sum(pair[i] for pair in pairs) for i in range(2)]
        most = max([num_spec_tokens, *(num for num, _ in pairs)])
        details = {"per_step_accepted": [n for _, n in pairs], "per_step_drafted": [n for n, _ in pairs]}
        return SpeculativeDecodingMetrics(
            mean_acceptance_length=1 + gained / len(pairs) if pairs else 1.0,
            draft_acceptance_rate=gained / drafted if drafted else 0.0,
            acceptance_histogram=_histogram([num for _, num in pairs], most),
            acceptance_histogram_by_draft_length={
                str(length): _histogram([num for of, num in pairs if of == length], length)
                for length in sorted({of for of, _ in pairs})
            },
            num_spec_steps=len(pairs),
            num_accepted_draft_tokens=gained,
            num_draft_tokens=drafted,
            num_spec_tokens=num_spec_tokens,
            **(details if is_detailed else {}),
        )


def _histogram(values: Sequence[int], most: int) -> list[int]:
    counts = Counter(values)
    return [counts[value] for value in range(most + 1)]
