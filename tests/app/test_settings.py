"""Flags and environment: who wins, what is refused, and what the engine is told."""

from pathlib import Path
from typing import Any

import pytest

from app.keys import parse_keys
from app.settings import SettingsError, load_settings
from core import EMBEDDED_MODEL, SpeculativeConfig
from tests.app.servers import make_settings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)


def test_a_flag_beats_its_variable_and_a_variable_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("OCTAVO_PORT", "9000")

    settings = load_settings({"max_num_seqs": "3", "port": None})
    assert (3, 9000, "0.0.0.0") == (settings.max_num_seqs, settings.port, settings.host)


def test_a_flag_that_says_no_beats_a_variable_that_says_yes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCTAVO_PROTECT_METRICS", "1")

    assert load_settings({}).protect_metrics
    assert not load_settings({"protect_metrics": False}).protect_metrics


def test_lists_are_repeated_flags_or_commas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "one, two")

    assert ("one", "two") == load_settings({}).api_key
    assert ("a", "b") == load_settings({"api_key": ("a", "b")}).api_key


@pytest.mark.parametrize(
    "origins", [('["http://a", "http://b"]',), ("http://a", "http://b"), ('["http://a"]', "http://b")]
)
def test_lists_may_be_in_json_as_vllm_takes_them(origins: tuple[str, ...]):
    assert ("http://a", "http://b") == load_settings({"allowed_origins": origins}).allowed_origins


def test_keys_come_from_flag_and_file_together(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# ours\nalice:one\n\n  two  \n", encoding="utf-8-sig")
    settings = load_settings({"api_key": ("bob:three",), "api_key_file": str(file)})

    assert ["bob", "alice", "key-2"] == [key.name for key in settings.api_keys]
    assert settings.api_keys[2].digest == parse_keys(["two"])[0].digest
    assert "three" not in repr(settings)


@pytest.mark.parametrize(
    ("text", "number"), [("512", 512), ("2k", 2000), ("2K", 2048), ("1.5K", 1536), ("3M", 3 * 2**20), ("1G", 2**30)]
)
def test_numbers_have_vllms_short_forms(text: str, number: int):
    assert number == load_settings({"kv_cache_memory_bytes": text}).kv_cache_memory_bytes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": "x"}, "--port x: "),
        ({"port": "70000"}, "--port 70000: "),
        ({"max_num_seqs": "0"}, "--max-num-seqs 0: "),
        ({"block_size": "1.5"}, "--block-size 1.5: "),
        ({"log_level": "loud"}, "--log-level loud: "),
        ({"speculative_config": "{bad"}, "--speculative-config"),
        ({"speculative_config": "[]"}, "--speculative-config []: must be a JSON object or null"),
        ({"served_model_name": ("a", "")}, "--served-model-name: a name is empty"),
        ({"speculative_config": '{"num_speculative_tokens": 99}'}, "--speculative-config"),
        ({"speculative_config": '{"no_such_field": 1}'}, "--speculative-config"),
        ({"chat_template": "/no/such/file"}, "--chat-template"),
        ({"chat_template": "{% bad"}, "--chat-template: the chat template is broken: line 1: "),
        ({"root_path": "llm"}, "--root-path llm: "),
        ({"root_path": "/llm/"}, "--root-path /llm/: "),
        ({"api_key": ("good", "alice:")}, "--api-key: key 2 is empty"),
        ({"api_key_file": "/no/such/file"}, "--api-key-file: "),
        ({"api_key_file": "/dev/null"}, "--api-key-file: /dev/null has no key in it"),
        ({"ssl_keyfile": "key.pem"}, "the --ssl-... flags need --ssl-certfile"),
        ({"ssl_cert_reqs": "2"}, "the --ssl-... flags need --ssl-certfile"),
        ({"ssl_certfile": "/no/such/file"}, "--ssl-certfile /no/such/file: "),
        ({"ssl_certfile": "/dev/null"}, "--ssl-certfile /dev/null: "),
        ({"no_such_setting": "1"}, "no-such-setting"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(flags: dict[str, Any], said: str):
    with pytest.raises(SettingsError) as refusal:
        load_settings(flags)

    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_bad_variable_is_named_as_a_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCTAVO_MAX_QUEUE", "-1")

    with pytest.raises(SettingsError, match="OCTAVO_MAX_QUEUE -1: "):
        load_settings({})


def test_log_levels_are_taken_in_any_case():
    assert "debug" == load_settings({"log_level": "DEBUG"}).log_level


def test_an_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCTAVO_MAX_MODEL_LEN", "")

    assert load_settings({}).max_model_len is None


@pytest.mark.parametrize(
    ("fields", "speculative"),
    [
        ({}, SpeculativeConfig()),
        ({"speculative_config": "null"}, None),
        ({"speculative_config": '{"num_speculative_tokens": 5}'}, SpeculativeConfig(num_speculative_tokens=5)),
        ({"model": "some.gguf"}, None),
    ],
)
def test_speculation_is_on_by_default_for_the_embedded_model_alone(fields: Any, speculative: Any):
    assert speculative == make_settings(**fields).engine_config().speculative


def test_the_engine_is_told_every_limit():
    limits = {
        "block_size": 8,
        "num_kv_blocks": 9,
        "max_model_len": 70,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "max_logprobs": 4,
        "seed": 5,
        "enable_scripts": True,
        "num_threads": 1,
    }
    config = make_settings(**limits).engine_config("a/path")

    assert "a/path" == config.model
    assert limits == {name: getattr(config, name) for name in limits}


def test_the_api_knows_the_model_by_its_own_name_unless_told():
    assert (EMBEDDED_MODEL,) == make_settings().model_names
    assert ("a", "b") == make_settings(served_model_name=("a", "b")).model_names


def test_a_template_is_a_file_or_itself(tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ 1 }}")

    assert "{{ 1 }}" == make_settings(chat_template=str(file)).chat_template_source
    assert "{{ 2 }}" == make_settings(chat_template="{{ 2 }}").chat_template_source
    assert make_settings().chat_template_source is None


def test_models_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")

    assert Path("/somewhere/octavo") == load_settings({}).cache_dir
