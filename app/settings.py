"""Flags and environment, parsed once: the only place that reads the environment.

Every field is a flag of `octavo serve` (`--max-num-seqs`) and a variable (`OCTAVO_MAX_NUM_SEQS`); a flag beats its
variable. The names are vLLM's where they mean the same, and there are no fields that are not honoured.
"""

import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.keys import ApiKey, parse_keys
from core import EMBEDDED_MODEL, EngineConfig, InvalidRequest, SpeculativeConfig

ENV_PREFIX = "OCTAVO_"
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class SettingsError(ValueError):
    """A flag or a variable that cannot be; the message is one line that names it."""


def _split(value: Any) -> Any:
    """A variable holds a list with commas between; one in JSON, as vLLM takes, may be anywhere."""
    if isinstance(value, tuple | list):
        return tuple(part for item in value for part in (_json_list(item) or (item,)))
    if not isinstance(value, str):
        return value
    return _json_list(value) or tuple(part.strip() for part in value.split(",") if part.strip())


def _json_list(value: Any) -> tuple[Any, ...] | None:
    if not (isinstance(value, str) and value.startswith("[")):
        return None
    try:
        return tuple(json.loads(value))
    except ValueError:
        return None


def _human_int(value: Any) -> Any:
    """vLLM's short forms: 2k is 2,000 and 2K is 2,048; 1.5G is 1.5 times 2**30."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", value.strip())):
        number = float(match[1]) * _SUFFIXES[match[2]]
        return int(number) if number.is_integer() else value
    return value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
HumanInt = Annotated[int, BeforeValidator(_human_int)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)]


class Settings(BaseSettings):
    """All settings of a server. Field descriptions are the flags' help."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    model: str = Field(
        default=EMBEDDED_MODEL, description="octavo-tiny, a pulled model, a file, a directory, ORG/NAME."
    )
    served_model_name: Names = Field(default=(), description="Name of the model in the API; repeat it for aliases.")
    host: str = Field(default="0.0.0.0", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 for any free one.")
    api_key: Names = Field(
        default=(), repr=False, description="Key that clients must send, KEY or NAME:KEY; repeat it for several."
    )
    api_key_file: Path | None = Field(default=None, description="File with further keys, one a line.")
    protect_metrics: bool = Field(default=False, description="Ask for the key on /metrics too.")
    allowed_origins: Names = Field(default=("*",), description="Origin of browsers that may call; repeat it.")
    allowed_methods: Names = Field(default=("*",), description="Method that they may use; repeat it.")
    allowed_headers: Names = Field(default=("*",), description="Header that they may send; repeat it.")
    allow_credentials: bool = Field(default=False, description="Let them send cookies along.")
    root_path: str = Field(
        default="", pattern=r"^(/\S*[^\s/])?$", description="Path below which a proxy offers this server, like /llm."
    )
    ssl_certfile: Path | None = Field(default=None, description="Certificate, PEM; with it the server speaks HTTPS.")
    ssl_keyfile: Path | None = Field(default=None, description="Its private key, if that is in a file of its own.")
    ssl_ca_certs: Path | None = Field(default=None, description="Who may have signed the certificates of clients.")
    ssl_cert_reqs: int = Field(
        default=0, ge=0, le=2, description="Whether clients must show one: 0 no, 1 if they like, 2 yes."
    )
    max_num_seqs: HumanInt = Field(default=64, ge=1, description="Most requests running at once.")
    max_num_batched_tokens: HumanInt = Field(default=512, ge=1, description="Most tokens computed in one step.")
    max_queue: HumanInt = Field(default=1024, ge=0, description="Most requests waiting for a place; beyond it 503.")
    max_num_seqs_per_key: HumanInt | None = Field(
        default=None, ge=1, description="Most requests of one key waiting or running; beyond it 429; default: no limit."
    )
    requests_per_minute_per_key: HumanInt | None = Field(
        default=None, ge=1, description="Most requests of one key a minute; beyond it 429; default: no limit."
    )
    tokens_per_minute_per_key: HumanInt | None = Field(
        default=None, ge=1, description="Most tokens of one key a minute, prompt and output; beyond it 429."
    )
    block_size: HumanInt = Field(default=16, ge=1, description="Tokens in a KV block.")
    num_kv_blocks: HumanInt | None = Field(default=None, ge=1, description="KV blocks; default: by memory.")
    kv_cache_memory_bytes: HumanInt | None = Field(default=None, ge=1, description="Memory of the KV cache: 512M.")
    max_model_len: HumanInt | None = Field(
        default=None, ge=1, description="Most tokens of a request; default: the model's."
    )
    enable_prefix_caching: bool = Field(default=True, description="Share KV blocks between equal beginnings.")
    preemption_mode: Literal["recompute", "swap", "auto"] = Field(
        default="recompute", description="What becomes of a preempted request's KV: recompute, swap or auto."
    )
    swap_space_bytes: HumanInt | None = Field(
        default=None, ge=1, description="Size of the second tier for swap and auto; default: 1G."
    )
    swap_file: Path | None = Field(default=None, description="File the second tier is mapped to; default: memory.")
    legacy_metric_names: bool = Field(
        default=False, description="Export series under names that vLLM has given up, too, for old dashboards."
    )
    strict_fields: bool = Field(
        default=False, description="Refuse requests with fields that nobody knows, rather than log them."
    )
    enable_debug: bool = Field(default=False, description="Serve /debug/kv, which shows other people's requests.")
    max_logprobs: HumanInt = Field(default=20, ge=0, description="Most alternatives a request may ask for.")
    seed: int = Field(default=0, description="Where the randomness of requests without a seed comes from.")
    speculative_config: str | None = Field(
        default=None,
        description='JSON, {"method": "ngram", "num_speculative_tokens": 3} for example, or null for none; default: '
        "the embedded model drafts with its draft model, as many as pay, others do not.",
    )
    enable_per_request_metrics: bool = Field(
        default=False, description="Tell in responses, under metrics, how long the request took."
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = Field(
        default="none", description="What responses tell of their drafts under metrics.speculative_decoding."
    )
    enable_scripts: bool = Field(default=False, description="Take requests that carry a script. For tests.")
    enable_fault_injection: bool = Field(default=False, description="Take requests that ask for faults. For tests.")
    chat_template: str | None = Field(default=None, description="File of a chat template, or the template itself.")
    kernels: Literal["auto", "numpy", "numba"] = Field(
        default="auto", description="What computes: numba where it is installed and the model suits it, or numpy."
    )
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        default="auto", description="Of the weights; auto: bfloat16, and float32 for the embedded model and numpy."
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of the KV cache; auto: float32 beside float32 weights, else bfloat16."
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="Threads of the numerics; default: usable cores, with numpy less one."
    )
    max_body_bytes: HumanInt = Field(default=16 * 2**20, ge=1, description="Longest request body; beyond it 413.")
    body_timeout: float = Field(default=60.0, gt=0, description="Seconds for a body to come whole; beyond them 408.")
    send_timeout: float = Field(
        default=60.0, ge=0, description="Seconds for a client to take more of its answer; beyond them it is cut off."
    )
    request_timeout: float | None = Field(
        default=None, gt=0, description="Seconds for a request to end; beyond them 504; default: no limit."
    )
    stall_timeout: float = Field(
        default=1.5, gt=0, description="Seconds without a sign of life of the engine, where steps take no tenth of it."
    )
    shutdown_timeout: float = Field(default=30.0, ge=0, description="Seconds for open streams to end after SIGTERM.")
    log_level: LogLevel = Field(default="info", description="Of the server's own log.")
    log_format: Literal["text", "json"] = Field(default="text", description="Of its lines: text or json.")
    otlp_traces_endpoint: str | None = Field(
        default=None, description="URL that traces go to, by OTLP over HTTP: http://localhost:4318/v1/traces."
    )
    uvicorn_log_level: LogLevel = Field(default="warning", description="Of the HTTP server's log.")
    cache_dir: Path = Field(default_factory=_cache_dir, description="Where pulled models lie.")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is the one in responses."""
        return self.served_model_name or (self.model,)

    @cached_property
    def api_keys(self) -> tuple[ApiKey, ...]:
        """The keys of flag or variable, and those of the file. Raises SettingsError."""
        try:
            return parse_keys(self.api_key) + self._keys_of_file()
        except ValueError as error:
            raise SettingsError(f"--api-key: {error}") from None

    def _keys_of_file(self) -> tuple[ApiKey, ...]:
        if self.api_key_file is None:
            return ()
        try:
            lines = [line.strip() for line in self.api_key_file.read_text(encoding="utf-8-sig").splitlines()]
            keys = parse_keys(line for line in lines if line and not line.startswith("#"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"--api-key-file: {error}") from error
        if not keys:  # whoever gives a file does not want an open server
            raise SettingsError(f"--api-key-file: {self.api_key_file} has no key in it")
        return keys

    @cached_property
    def chat_template_source(self) -> str | None:
        """The template given by flag. Raises SettingsError when it is neither a file nor a template."""
        if self.chat_template is None or "{" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SettingsError(f"--chat-template: {error}") from error

    def engine_config(self, model: str | None = None) -> EngineConfig:
        """What the engine is told; `model` is the path that the name stands for. Raises SettingsError."""
        return EngineConfig(
            model=model or self.model,
            block_size=self.block_size,
            num_kv_blocks=self.num_kv_blocks,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption_mode=self.preemption_mode,
            swap_space_bytes=self.swap_space_bytes,
            swap_file=self.swap_file,
            max_logprobs=self.max_logprobs,
            seed=self.seed,
            speculative=self._speculative(),
            enable_scripts=self.enable_scripts,
            kernels=self.kernels,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            num_threads=self.num_threads,
            cache_dir=self.cache_dir,
        )

    def _speculative(self) -> SpeculativeConfig | None:
        """Not said: on for the embedded model, which brings its draft, off for others."""
        if self.speculative_config is None:
            return SpeculativeConfig() if self.model == EMBEDDED_MODEL else None
        try:
            value = json.loads(self.speculative_config)
            if value is not None and not isinstance(value, dict):
                raise ValueError("must be a JSON object or null")
            return None if value is None else SpeculativeConfig(**value)
        except (TypeError, ValueError) as error:  # InvalidRequest is a ValueError
            raise SettingsError(f"--speculative-config {self.speculative_config}: {error}") from error


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """Settings from flags (those that are not None) and environment.

    Raises:
        SettingsError: one of them cannot be; the message is one line.
    """
    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})
        config = settings.engine_config()
        _compile_chat_template(settings)
        _check_tls(settings)
        _check_tracing(settings)
        _ = settings.api_keys
        if "" in settings.served_model_name:
            raise SettingsError("--served-model-name: a name is empty")
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(problem, flags) for problem in error.errors())) from error
    except InvalidRequest as error:
        raise SettingsError(str(error)) from error
    if settings.per_request_spec_decode_metrics != "none" and config.speculative is None:
        raise SettingsError("--per-request-spec-decode-metrics needs speculation: see --speculative-config")
    return settings


def _compile_chat_template(settings: Settings) -> None:
    """Now, so that a wrong path or a broken template is an error of the command line and not of every request."""
    if settings.chat_template_source is None:
        return
    from app.chat_template import ChatTemplate  # with jinja2, slow to import

    try:
        ChatTemplate(settings.chat_template_source, {})
    except InvalidRequest as error:
        raise SettingsError(f"--chat-template: {error}") from error


def _check_tls(settings: Settings) -> None:
    """The same for certificates."""
    files = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    if settings.ssl_certfile is None:
        if any(files) or settings.ssl_cert_reqs:
            raise SettingsError("the --ssl-... flags need --ssl-certfile")
        return
    import ssl

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=lambda: "")  # or it would ask
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except OSError as error:
        raise SettingsError(f"--ssl-certfile {', '.join(str(file) for file in files if file)}: {error}") from error


def _check_tracing(settings: Settings) -> None:
    """The same for packages that are not everybody's."""
    if settings.otlp_traces_endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401
    except ImportError as error:
        raise SettingsError(f"--otlp-traces-endpoint needs the extra otel: {error}") from error


def _describe(problem: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    name = str(problem["loc"][0])
    source = flag_of(name) if flags.get(name) is not None else ENV_PREFIX + name.upper()
    return f"{source} {problem['input']}: {problem['msg']}"
