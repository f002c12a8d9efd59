"""What an independent implementation says about SmolLM2: greedy tokens and logits by Hugging Face transformers.

Transformers reads the same GGUF file by its own code (names, dequantization, row order of q and k, tokenizer) and runs
it in float32, so the committed result shares nothing with ours but the file. Run in an environment with the dependency
group `reference`:

    python tools/reference_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

It writes tests/data/smollm2_reference.json: per prompt its token ids, 32 greedy tokens (the end token does not stop
it), and for each of them the logits of the 20 likeliest ids and of 32 fixed ids.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

NUM_TOKENS = 32
NUM_TOP = 20
NUM_FIXED = 32
DECIMALS = 5
OUTPUT = Path(__file__).parents[1] / "tests" / "data" / "smollm2_reference.json"

PROMPTS: dict[str, str] = {
    "fact": "The capital of France is",
    "story": "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    "code": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n',
    "unicode": "Grüße aus Zürich! 你好，世界 😀 — naïve café, Ελληνικά, русский:",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 1234567890, 3.14159,",
    "whitespace": "Name:\tAda  Lovelace\n\n  - born:   1815\r\n  - field:",
    "repetition": "the cat sat on the mat. " * 24,
}
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]


def main() -> None:
    """Write the reference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(to_text(make_reference(arguments.gguf)), encoding="utf-8")


def make_reference(gguf: Path) -> dict[str, Any]:
    """Run every prompt; all of it as JSON values."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    torch.set_num_threads(2)
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    # The file names its pre-tokenizer, `smollm`: digits apart, then as GPT-2. Transformers reads past the name and
    # splits as GPT-2 alone, which shows where spaces stand before a number.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # always so many tokens
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    vocab_size = model.config.vocab_size
    fixed_ids = sorted(np.random.default_rng(0).choice(vocab_size, NUM_FIXED, replace=False).tolist())
    return {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "messages": MESSAGES,
        "fixed_ids": fixed_ids,
        "prompts": [
            {"name": name, "text": text, **_run(model, tokenizer(text)["input_ids"], fixed_ids)}
            for name, text in {**PROMPTS, "chat": chat}.items()
        ],
    }


def _run(model: Any, prompt_ids: list[int], fixed_ids: list[int]) -> dict[str, Any]:
    """Greedy tokens with transformers' cache, then the logits at each of them by one pass over the whole without."""
    import torch

    prompt = torch.tensor([prompt_ids])
    with torch.no_grad():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        ids = output[0].tolist()
        rows = model(output, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    assert ids[len(prompt_ids) :] == rows.argmax(-1).tolist(), "transformers disagrees with itself"
    top = rows.topk(NUM_TOP)
    return {
        "prompt_ids": prompt_ids,
        "output_ids": ids[len(prompt_ids) :],
        "top_ids": top.indices.tolist(),
        "top_logits": _rounded(top.values),
        "fixed_logits": _rounded(rows[:, fixed_ids]),
    }


def _rounded(values: Any) -> list[list[float]]:
    return [[round(v, DECIMALS) for v in row] for row in values.double().tolist()]


def to_text(reference: dict[str, Any]) -> str:
    """JSON with one prompt's field a line: small, and still fit for a diff."""
    head = {key: value for key, value in reference.items() if key != "prompts"}
    prompts = [
        "{"
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in p.items())
        + "}"
        for p in reference["prompts"]
    ]
    return json.dumps(head, indent=1)[:-2] + ',\n "prompts": [\n' + ",\n".join(prompts) + "\n]}\n"


if __name__ == "__main__":
    main()
