import pytest

from loadgen.workload import WARMUP_STREAM, FixedPrompts, InvalidDataset, Prompt, RandomPrompts, read_prompts


def test_a_prompt_depends_on_seed_and_number_alone():
    """Asked for in another order, by another object, it is the same; with another seed it is not."""
    forwards = [RandomPrompts(7, 16, 8, 0.5)(index) for index in range(20)]
    prompts = RandomPrompts(7, 16, 8, 0.5)
    backwards = [prompts(index) for index in reversed(range(20))]

    assert forwards == backwards[::-1]
    assert forwards[0] != RandomPrompts(8, 16, 8, 0.5)(0)
    assert 20 == len({prompt.content for prompt in forwards})


def test_warm_up_prompts_are_never_measured_ones():
    measured = {RandomPrompts(0, 8, 4)(index).content for index in range(200)}
    warm_up = {RandomPrompts(0, 8, 4, stream=WARMUP_STREAM)(index).content for index in range(200)}

    assert not measured & warm_up


def test_without_a_range_all_lengths_are_as_asked():
    prompts = [RandomPrompts(1, 33, 9)(index) for index in range(50)]

    assert {(33, 9)} == {(prompt.num_tokens, prompt.max_tokens) for prompt in prompts}


def test_a_range_is_used_to_its_ends():
    prompts = [RandomPrompts(1, 10, 4, 0.5)(index) for index in range(500)]

    assert set(range(5, 16)) == {prompt.num_tokens for prompt in prompts}
    assert set(range(2, 7)) == {prompt.max_tokens for prompt in prompts}


def test_ids_fill_the_vocabulary_and_stay_below_its_size():
    ids = {token for index in range(50) for token in RandomPrompts(1, 64, 1, vocab_size=20)(index).content}

    assert set(range(20)) == ids


def test_a_length_is_at_least_one_token():
    prompts = [RandomPrompts(1, 1, 1, 0.9)(index) for index in range(50)]

    assert 1 == min(prompt.num_tokens for prompt in prompts)


def test_negative_seeds_are_seeds():
    assert RandomPrompts(-1, 8, 4)(0) != RandomPrompts(1, 8, 4)(0)


def test_a_file_holds_text_and_token_ids(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Once", "output_len": 3}\n\n{"prompt": [1, 2, 3]}\n')
    prompts = read_prompts(path, default_output_len=32)

    assert FixedPrompts((Prompt("Once", 3), Prompt((1, 2, 3), 32))) == prompts
    assert prompts(0) == prompts(2)
    assert prompts(0).num_tokens is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', "line 2"),
        ('{"text": "a"}\n', "line 1.*prompt"),
        ('{"prompt": ""}\n', "the prompt is empty"),
        ('{"prompt": "a", "output_len": 0}\n', "output_len must be at least 1"),
        ('{"prompt": [1, 1.5]}', "a token id must be a whole number, got 1.5"),
        ('{"prompt": [true]}', "a token id must be a whole number, got True"),
        ('{"prompt": ["1", "2"]}', "a token id must be a whole number, got '1'"),
        ('{"prompt": "a", "output_len": 1.9}', "output_len must be a whole number, got 1.9"),
        ('{"prompt": "a"}\n' + "[" * 100_000, "line 2"),
        ('{"prompt": "\udcff"}', "line 1.*utf-8"),
        ("\n", "holds no prompts"),
    ],
)
def test_a_file_that_is_none_is_refused_naming_the_line(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(InvalidDataset, match=message):
        read_prompts(path, default_output_len=1)


def test_a_null_length_is_the_default_and_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "é", "output_len": null}\n', encoding="utf-8-sig")

    assert Prompt("é", 7) == read_prompts(path, 7)(0)
