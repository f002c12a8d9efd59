"""What the plain float64 model says of continuations: standard input to standard output, as JSON.

Run by the environment that has Octavo, for the tests that run in the clients' own. Takes a list of [context,
continuation] texts and gives the log-likelihood of each continuation, and whether it is what the model would say.
"""

import json
import sys

import numpy as np

from core.model import tiny
from core.model.weights import load_model_files
from core.tokenizer import ByteTokenizer
from tests.oracle import llama_logits, softmax


def main() -> None:
    weights, tokenizer = load_model_files(tiny.TARGET_DIR), ByteTokenizer()
    answers = []
    for context, continuation in json.load(sys.stdin):
        before, after = (tokenizer.encode(text) for text in (context, continuation))
        rows = llama_logits(weights.config, weights.tensors, [*before, *after])[len(before) - 1 : -1]
        logprobs = np.log(softmax(rows))
        loglikelihood = float(logprobs[np.arange(len(after)), after].sum())
        answers.append([loglikelihood, bool((rows.argmax(axis=1) == after).all())])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
