"""A full pool on purpose, under an engine: the oldest request goes on, and all get through."""

from tests.builders import engine, new_request, run, token_ids_of


def test_with_its_free_blocks_held_the_oldest_request_goes_on_and_the_others_wait():
    it = engine(num_kv_blocks=20, block_size=2)
    it.hold_free_blocks()
    assert (20, 0) == (it.stats.kv_blocks_used, it.stats.kv_blocks_free)
    for name in "ab":
        it.add(new_request(name, prompt=[ord(name)] * 5, max_tokens=6))
    it.step()

    assert (1, 1) == (it.stats.num_running, it.stats.num_waiting)
    assert 20 - it.stats.kv_blocks_used <= 1
    outputs = run(it)
    assert [6, 6] == [len(token_ids_of(outputs[name])) + (name == "a") for name in "ab"]
    assert 0 == it.stats.num_running + it.stats.num_waiting


def test_held_blocks_come_from_the_running_by_preemption_and_go_back():
    it = engine(num_kv_blocks=20, block_size=2, enable_prefix_caching=False)
    for name in "abc":
        it.add(new_request(name, prompt=[ord(name)] * 4, max_tokens=9))
    it.step()
    it.hold_free_blocks()
    it.hold_free_blocks()
    outputs = run(it)

    assert it.stats.num_preemptions > 0
    assert [8, 8, 8] == [len(token_ids_of(outputs[name])) for name in "abc"]
    it.release_held_blocks()
    it.release_held_blocks()
    assert (0, 20) == (it.stats.kv_blocks_used, it.stats.kv_blocks_free)


def test_samples_of_one_prompt_come_through_a_held_pool():
    it = engine(num_kv_blocks=20, block_size=2)
    it.hold_free_blocks()
    it.add(new_request("a", prompt=[7] * 5, max_tokens=7, sibling_ids=["b", "c"]))
    outputs = run(it)

    assert [7, 7, 7] == [len(token_ids_of(outputs[name])) for name in "abc"]
