"""The command from words to exit code, against a server on loopback."""

import json

import pytest
import typer
from typer.testing import CliRunner

from loadgen.cli import bench, default_filename
from loadgen.options import BenchOptions
from tests.loadgen.stubs import DONE, ScriptedServer, chunk, event, plain_answer, serve_in_thread
from tests.loadgen.test_server_metrics import exposition

FEW = "--num-prompts", "2", "--max-concurrency", "1", "--num-warmups", "0"


def run(*words, env=None):
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, words, env={"COLUMNS": "160", **(env or {})})


def answer(body):
    return plain_answer(len(body["prompt"]), body["max_tokens"], tokens_per_chunk=3)


def run_against(script, *words, metrics=(), env=None):
    server = ScriptedServer(script, metrics=iter(metrics))
    with serve_in_thread(server) as url:
        result = run("--base-url", url, *words, env=env)
    return result, server


def test_a_closed_loop_from_words_to_result(tmp_path):
    """The whole command: every request as asked, the table, the file, the server's own figures beside."""
    result, server = run_against(
        answer,
        *("--max-concurrency", "4", "--num-prompts", "12", "--num-warmups", "3"),
        *("--random-input-len", "20", "--random-output-len", "9", "--seed", "5"),
        *("--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"),
        *("--metadata", "commit=abc", "--label", "first"),
        metrics=[exposition(100, 50, 128), exposition(300, 200, 128)],
    )
    saved = json.loads((tmp_path / "new" / "r.json").read_text())

    assert 0 == result.exit_code, result.output
    assert 15 == len(server.bodies)
    assert {20} == {len(body["prompt"]) for body in server.bodies}
    assert 15 == len({tuple(body["prompt"]) for body in server.bodies})
    assert {"stub-model"} == {body["model"] for body in server.bodies}
    assert (12, 0) == (saved["completed"], saved["failed"])
    assert (12 * 20, 12 * 9) == (saved["total_input_tokens"], saved["total_output_tokens"])
    assert ("abc", "first", "stub-model") == (saved["commit"], saved["label"], saved["model_id"])
    assert 12 * 6 == saved["num_itl"]
    assert (0.75, 4.0) == (saved["server"]["acceptance_rate"], saved["server"]["acceptance_length"])
    assert (75.0, 4.0) == (saved["spec_decode_acceptance_rate"], saved["spec_decode_acceptance_length"])
    assert (50, 200, 150) == tuple(saved[f"spec_decode_{k}"] for k in ("num_drafts", "draft_tokens", "accepted_tokens"))
    assert (128, 128) == (saved["server"]["kv_blocks_free_before"], saved["server"]["kv_blocks_free_after"])
    assert "p99_ttft_ms" in saved["not_resolved"]
    assert ["ttft", "e2el"] == saved["headline"]
    for text in ("12 completed, 0 failed", "closed loop, at most 4", "0.750 (150 of 200", "4.000 tokens a step (50 "):
        assert text in result.output
    assert "240 planned, 240 billed" in result.output
    assert "n/r" in result.output


def test_with_a_rate_the_headline_counts_from_the_intended_time(tmp_path):
    result, _ = run_against(
        answer,
        *("--request-rate", "200", "--arrival", "constant", "--num-prompts", "20"),
        *("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
    )
    saved = json.loads((tmp_path / "r.json").read_text())
    rows = [line.split()[1] for line in result.output.splitlines() if line.startswith("│ ") and "ttft" in line]

    assert 0 == result.exit_code, result.output
    assert ["ttft_corrected", "ttft"] == rows
    assert ["ttft_corrected", "e2el_corrected"] == saved["headline"]
    assert list(range(20)) == [request["index"] for request in saved["requests"]]
    gaps = [b["t_sched"] - a["t_sched"] for a, b in zip(saved["requests"], saved["requests"][1:], strict=False)]
    assert [0.005] * 19 == pytest.approx(gaps)
    assert 200.0 == pytest.approx(saved["planned_rate"])


def test_every_option_is_understood(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2], "output_len": 3}\n')
    result, server = run_against(
        answer,
        *("--endpoint", "/v1/completions", "--model", "other", "--header", "X-Team: red", "--api-key", "secret"),
        *("--seed", "1", "--request-rate", "500", "--burstiness", "0.5", "--arrival", "gamma", "--poisson-process"),
        *("--max-concurrency", "8", "--num-prompts", "6", "--duration", "60", "--grace-period", "5"),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--random-range-ratio", "0.1"),
        *("--random-input-len", "4", "--random-output-len", "2", "--vocab-size", "100"),
        *("--temperature", "0.7", "--ignore-eos", "--extra-body", '{"top_p": 0.9}', "--num-warmups", "1"),
        *("--timeout", "20", "--ready-check-timeout-sec", "5", "--max-error-rate", "0.1"),
        *("--goodput", "ttft:60000 tpot:60000", "--goodput", "e2el:60000"),
        *("--percentile-metrics", "ttft,itl,ntpot", "--metric-percentiles", "50,95", "--no-server-metrics"),
        *("--save-result", "--result-dir", str(tmp_path), "--metadata", "a=b", "--metadata", "c=d", "--label", "x/y"),
        "--disable-tqdm",
    )
    saved = json.loads(next(tmp_path.glob("x_y-500qps-concurrency8-*.json")).read_text())

    assert 0 == result.exit_code, result.output
    assert ("red", "Bearer secret") == (server.headers[0]["x-team"], server.headers[0]["authorization"])
    assert [[1, 2]] * 6 == [body["prompt"] for body in server.bodies[1:]]
    expected = {"model": "other", "max_tokens": 3, "temperature": 0.7, "ignore_eos": True, "top_p": 0.9}
    assert expected == {key: server.bodies[-1][key] for key in expected}
    assert ("b", "d", 0.5, 8) == (saved["a"], saved["c"], saved["burstiness"], saved["max_concurrency"])
    assert 1.0 == saved["goodput"]["fraction"]
    assert saved["server"] is None
    assert "p95" in result.output
    assert "secret" not in json.dumps(saved)


def mixed(body):
    """By the prompt's first token: an error frame in a 200, a stream without [DONE], a refusal, or an answer."""
    match body["prompt"][0] % 4:
        case 0:
            return [event(chunk("a", token_ids=[1])), event({"error": {"message": "broke [here]"}}), DONE]
        case 1:
            return [event(chunk("a", token_ids=[1]))]
        case 2:
            return 503
        case _:
            return answer(body)


def run_mixed(tmp_path, *words):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": [first], "output_len": 4}) for first in range(4)))
    flags = ("--dataset-path", str(prompts), "--num-prompts", "8", "--max-concurrency", "2", "--num-warmups", "0")
    return run_against(mixed, *flags, "--save-result", "--result-dir", str(tmp_path), *words)[0]


def test_failures_are_counted_by_kind_and_never_as_answers(tmp_path):
    result = run_mixed(tmp_path, "--result-filename", "r.json")
    saved = json.loads((tmp_path / "r.json").read_text())

    assert 0 == result.exit_code, result.output
    assert {"error frame": 2, "truncated": 2, "http 503": 2} == saved["failures"]
    assert (2, 6, 8) == (saved["completed"], saved["failed"], saved["total_output_tokens"])
    assert 2 == saved["num_ttft"]
    assert "broke [here]" in result.output
    assert "6 of 8 (75.0%)" in result.output


def test_too_many_failures_fail_the_command(tmp_path):
    assert 1 == run_mixed(tmp_path, "--max-error-rate", "0.5").exit_code
    assert 0 == run_mixed(tmp_path, "--max-error-rate", "0.75").exit_code


def test_nothing_but_failures_fails_the_command(tmp_path):
    result, _ = run_against(lambda body: 503, "--num-prompts", "3", "--save-result", "--result-dir", str(tmp_path))
    saved = json.loads(next(tmp_path.glob("*.json")).read_text())

    assert 1 == result.exit_code
    assert {"http 503": 3} == saved["failures"]
    assert "server metrics: absent" in result.output


def test_a_server_that_is_not_there_is_said_so():
    with serve_in_thread(ScriptedServer(answer)) as url:
        pass
    result = run("--base-url", url, "--ready-check-timeout-sec", "0")

    assert 1 == result.exit_code
    assert "is not ready" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--burstiness", "2", "--arrival", "constant"], "shapes gamma"),
        (["--header", "no-colon"], "--header takes KEY:VALUE"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--extra-body", "{"], "is not JSON"),
        (["--metadata", "x"], "--metadata takes KEY=VALUE"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-name", "random", "--prompt", "a"], "excludes"),
        (["--metric-percentiles", "50,high"], "high"),
        (["--goodput", "ttft:nan"], "must not be below 0"),
        (["--duration", "inf", "--request-rate", "5"], "--duration must be finite"),
        (["--goodput", "ttft:-1"], "must not be below 0"),
        (["--base-url", "localhost:8000"], "--base-url must be like http://HOST:PORT"),
        (["--base-url", "http://localhost:99999"], "Port out of range"),
        (["--header", "a b: c"], "headers cannot have"),
        (["--header", "a: b\nc: d"], "headers cannot have"),
        (["--header", "Content-Length: 3"], "content-length is the client's own"),
        (["--save-result", "--result-dir", __file__], "the result cannot be written"),
    ],
)
def test_a_wrong_word_is_a_usage_error(words, message):
    result = run(*words)

    assert 2 == result.exit_code
    assert message in result.output


def test_a_bad_prompt_file_is_a_usage_error(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("{}\n")
    result = run("--dataset-path", str(path))

    assert 2 == result.exit_code
    assert "p.jsonl, line 1" in result.output


def test_the_key_comes_from_the_environment_too():
    _, server = run_against(answer, "--num-prompts", "1", "--num-warmups", "0", env={"OPENAI_API_KEY": "env-key"})

    assert "Bearer env-key" == server.headers[0]["authorization"]


def test_a_file_name_says_what_was_run():
    assert default_filename(BenchOptions(request_rate=2.5)).startswith("octavo-2.5qps-")
    assert default_filename(BenchOptions(max_concurrency=8)).startswith("octavo-infqps-concurrency8-")


def test_a_key_need_not_be_ascii():
    result, server = run_against(answer, *FEW, "--api-key", "kéy", "--header", "x-note: é")

    assert 0 == result.exit_code, result.output
    assert ("Bearer kéy".encode().decode("latin-1"), "Ã©") == tuple(
        server.headers[0][name] for name in ("authorization", "x-note")
    )


def test_metadata_adds_to_the_result_and_changes_nothing_of_it(tmp_path):
    files = "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"
    run_against(answer, *FEW, *files, "--metadata", "completed=99", "--metadata", "commit=abc")
    saved = json.loads((tmp_path / "r.json").read_text())

    assert (2, "abc") == (saved["completed"], saved["commit"])


def test_a_result_that_is_there_stays_when_the_run_does_not_come_about(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for path in (old, new):
        words = "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0", "--save-result"
        assert 1 == run(*words, "--result-dir", str(tmp_path), "--result-filename", path.name).exit_code

    assert "{}" == old.read_text()
    assert not new.exists()
