"""What one benchmark is asked to do: frozen, checked once, written into the result."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadgen.arrivals import Arrival, Schedule, all_at_once, schedule_duration, schedule_requests
from loadgen.metrics import METRIC_NAMES, PER_REQUEST
from loadgen.workload import WARMUP_STREAM, FixedPrompts, Prompt, PromptSource, RandomPrompts, read_prompts

DEFAULT_NUM_PROMPTS = 100
DEFAULT_METRICS = ("ttft", "tpot", "itl", "icl", "e2el", "max_stall", "schedule_delay")

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OUR_HEADERS = {"content-length", "transfer-encoding"}


@dataclass(frozen=True)
class BenchOptions:
    """One field per command-line option; loadgen.cli says what each means.

    Raises:
        ValueError: values that contradict each other or are out of range.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    arrival: Arrival | None = None
    is_exact: bool = True
    max_concurrency: int | None = None
    num_prompts: int | None = None
    duration_s: float | None = None
    grace_period_s: float = 30.0
    prompt: str | None = None
    dataset_path: Path | None = None
    random_input_len: int = 64
    random_output_len: int = 32
    random_range_ratio: float = 0.0
    vocab_size: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    num_warmups: int = 2
    timeout_s: float = 600.0
    ready_check_timeout_s: float = 30.0
    max_error_rate: float | None = None
    goodput_s: Mapping[str, float] = field(default_factory=dict)
    server_metrics: bool = True
    percentile_metrics: tuple[str, ...] = DEFAULT_METRICS
    metric_percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    metadata: Mapping[str, str] = field(default_factory=dict)
    label: str | None = None

    def __post_init__(self) -> None:
        self._check_server()
        self._check_traffic()
        self._check_prompts()
        self._check_metrics()

    def _check_server(self) -> None:
        """Now, rather than as a server that does not become ready."""
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # reading a port checks it
            raise ValueError(f"--base-url must be like http://HOST:PORT, got {self.base_url!r}")
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not value.isprintable():
                raise ValueError(f"--header {name!r}: its name or its value has what headers cannot have")
            if name.lower() in _OUR_HEADERS:
                raise ValueError(f"--header {name} is the client's own to set")

    def _check_traffic(self) -> None:
        if not self.request_rate > 0:
            raise ValueError(f"--request-rate must be above 0, got {self.request_rate}")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"--burstiness must be above 0, got {self.burstiness}")
        if self.burstiness != 1 and self.arrival not in (None, "gamma"):
            raise ValueError(f"--burstiness shapes gamma arrivals, not --arrival {self.arrival}")
        if self.duration_s is not None and not math.isfinite(self.duration_s):
            raise ValueError(
                f"--duration must be finite, got {self.duration_s:g}; without it --num-prompts ends the run"
            )
        if self.duration_s is not None and self.is_burst and self.num_prompts is None:
            raise ValueError("--duration needs --request-rate, --max-concurrency or --num-prompts to bound the load")
        if self.max_error_rate is not None and not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"--max-error-rate must be in [0, 1], got {self.max_error_rate}")

    def _check_prompts(self) -> None:
        if self.prompt is not None and self.dataset_path is not None:
            raise ValueError("--prompt and --dataset-path exclude each other")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"--random-range-ratio must be in [0, 1), got {self.random_range_ratio}")
        if self.is_chat and self.prompt is None and self.dataset_path is None:
            raise ValueError("a chat endpoint takes text, not token ids: give --prompt or --dataset-path")

    def _check_metrics(self) -> None:
        for name in self.percentile_metrics:
            if name not in METRIC_NAMES:
                raise ValueError(f"--percentile-metrics: {name!r} is none of {', '.join(METRIC_NAMES)}")
        for name, limit_s in self.goodput_s.items():
            if name not in PER_REQUEST:
                raise ValueError(f"--goodput: {name!r} is none of {', '.join(PER_REQUEST)}")
            if not limit_s >= 0:
                raise ValueError(f"--goodput: the limit of {name} must not be below 0, got {limit_s * 1e3:g}")
        for percent in self.metric_percentiles:
            if not 0 < percent < 100:
                raise ValueError(f"--metric-percentiles must be between 0 and 100, got {percent:g}")

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("/chat/completions")

    @property
    def is_open_loop(self) -> bool:
        """A finite rate: requests leave by schedule, and latency counts from it."""
        return self.request_rate < math.inf

    @property
    def is_burst(self) -> bool:
        """Neither rate nor limit: everything leaves at once."""
        return not self.is_open_loop and self.max_concurrency is None

    @property
    def num_requests(self) -> int | None:
        """How many at most; None when only the duration ends the run."""
        if self.num_prompts is None and self.duration_s is None:
            return DEFAULT_NUM_PROMPTS
        return self.num_prompts

    @property
    def arrival_law(self) -> Arrival:
        return self.arrival or ("poisson" if self.burstiness == 1 else "gamma")

    @property
    def stop_after_s(self) -> float | None:
        return None if self.duration_s is None else self.duration_s + self.grace_period_s

    def schedule(self) -> Schedule | None:
        """None for a closed loop, which has none."""
        if self.is_burst:
            return all_at_once(self.num_requests or 0)
        if not self.is_open_loop:
            return None
        law, rate = self.arrival_law, self.request_rate
        if self.num_requests is not None and not self._duration_comes_first(self.num_requests):
            return schedule_requests(
                law, rate, self.num_requests, seed=self.seed, burstiness=self.burstiness, is_exact=self.is_exact
            )
        return schedule_duration(
            law, rate, self.duration_s or 0.0, seed=self.seed, burstiness=self.burstiness, is_exact=self.is_exact
        )

    def _duration_comes_first(self, num_requests: int) -> bool:
        return self.duration_s is not None and self.duration_s * self.request_rate < num_requests

    def prompts(self) -> PromptSource:
        if self.prompt is not None:
            return FixedPrompts((Prompt(self.prompt, self.random_output_len),))
        if self.dataset_path is not None:
            return read_prompts(self.dataset_path, self.random_output_len)
        return self._random_prompts()

    def warmup_prompts(self) -> PromptSource:
        """Never the measured ones: those would be in the server's prefix cache afterwards."""
        if self.is_chat:
            return lambda index: Prompt(f"Warm-up number {index}.", self.random_output_len)
        return self._random_prompts(stream=WARMUP_STREAM)

    def _random_prompts(self, **stream: int) -> RandomPrompts:
        return RandomPrompts(
            self.seed,
            self.random_input_len,
            self.random_output_len,
            self.random_range_ratio,
            self.vocab_size,
            **stream,
        )
