"""Transformers' generate over a static batch, driven by JSON lines: drive_transformers.py MODEL DTYPE.

Runs in that engine's own environment and imports nothing of ours. It says {"versions": ...} when it is ready; for each
line {"prompts": [[ids]], "num_new_tokens": n} it answers with seconds, the first tokens' times and the tokens.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers


class NoteFirst:
    """Asked after each token of the whole batch, it never stops."""

    def __init__(self) -> None:
        self.first_s: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self.first_s is None:
            self.first_s = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def run(model: Any, prompts: list[list[int]], num_new_tokens: int) -> dict[str, Any]:
    note = NoteFirst()
    started_s = time.perf_counter()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new_tokens,
            do_sample=False,
            stopping_criteria=[note],
        )
    seconds = time.perf_counter() - started_s
    assert note.first_s is not None
    first_s = [note.first_s - started_s] * len(prompts)
    return {"seconds": seconds, "first_token_s": first_s, "num_tokens": output.numel() - ids.numel()}


def main() -> None:
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    run(model, [[1, 2, 3, 4]], 1)
    say({"versions": f"transformers {transformers.__version__}, torch {torch.__version__}"})
    for line in sys.stdin:
        say(run(model, **json.loads(line)))


main()
