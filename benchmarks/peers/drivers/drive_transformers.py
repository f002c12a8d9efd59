"""Transformers' generate over a static batch, driven by JSON lines: drive_transformers.py MODEL DTYPE.

Runs in that engine's own environment and imports nothing of ours. It says {"versions": ...} when it is ready; for each
line {"prompts": [[ids]], "num_new_tokens": n} it answers with seconds, the first tokens' times and the tokens.
"""

import json
import sys
import time

import torch
import transformers


class NoteFirst(transformers.StoppingCriteria):
    """Asked after each token of the whole batch, it never stops."""

    def __init__(self):
        self.first_s = None

    def __call__(self, input_ids, scores, **kwargs):
        if self.first_s is None:
            self.first_s = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def say(value):
    print(json.dumps(value), flush=True)


def run(model, prompts, num_new_tokens):
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
    first_s = [note.first_s - started_s] * len(prompts)
    return {"seconds": seconds, "first_token_s": first_s, "num_tokens": output.numel() - ids.numel()}


def main():
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    run(model, [[1, 2, 3, 4]], 1)
    say({"versions": f"transformers {transformers.__version__}, torch {torch.__version__}"})
    for line in sys.stdin:
        say(run(model, **json.loads(line)))


main()
