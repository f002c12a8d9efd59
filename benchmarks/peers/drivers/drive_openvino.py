"""OpenVINO GenAI's continuous batching, driven by JSON lines: drive_openvino.py MODEL MAX_STREAMS KV_TOKENS.

Runs in that engine's own environment and imports nothing of ours. It says {"versions": ...} when it is ready; for each
line {"prompts": [[ids]], "num_new_tokens": n} it answers with seconds, the first tokens' times and the tokens.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

KV_BYTES_PER_TOKEN = 23_040  # SmolLM2-135M in two bytes: 2 * 30 layers * 3 heads * 64 * 2


def say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def run(pipeline: Any, numbers: Iterator[int], prompts: list[list[int]], num_new_tokens: int) -> dict[str, Any]:
    config = genai.GenerationConfig(max_new_tokens=num_new_tokens, ignore_eos=True, do_sample=False)
    started_s = time.perf_counter()
    handles = [
        pipeline.add_request(next(numbers), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        for prompt in prompts
    ]
    first_s: dict[int, float] = {}
    counts = [0] * len(handles)
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for i, handle in enumerate(handles):
            if handle.can_read():
                first_s.setdefault(i, time.perf_counter() - started_s)
                counts[i] += sum(len(output.generated_ids) for output in handle.read().values())
    seconds = time.perf_counter() - started_s
    return {"seconds": seconds, "first_token_s": list(first_s.values()), "num_tokens": sum(counts)}


def main() -> None:
    model, max_streams, kv_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = max_streams
    scheduler.num_kv_blocks = 0
    scheduler.cache_size = max(1, round(kv_tokens * KV_BYTES_PER_TOKEN / 2**30))
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": 2})
    numbers = iter(range(10**9))
    run(pipeline, numbers, [[1, 2, 3, 4]], 1)
    say({"versions": f"openvino-genai {genai.__version__}, openvino {openvino.__version__}"})
    for line in sys.stdin:
        say(run(pipeline, numbers, **json.loads(line)))


main()
