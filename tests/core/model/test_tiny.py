"""The embedded model: target and draft lie in the package, load, and fit each other and the byte tokenizer."""

from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.model import tiny
from core.model.weights import load_model_files
from core.tokenizer import ByteTokenizer

MAX_BYTES = 8 * 2**20
MIN_CONTEXT = 4608


def test_target_and_draft_load_and_speak_bytes() -> None:
    target, draft = load_model_files(tiny.TARGET_DIR).config, load_model_files(tiny.DRAFT_DIR).config

    assert ByteTokenizer().vocab_size == target.vocab_size == draft.vocab_size
    assert min(target.max_position_embeddings, draft.max_position_embeddings) >= MIN_CONTEXT
    assert target.num_layers > draft.num_layers


def test_both_together_are_small() -> None:
    files = [file for directory in (tiny.TARGET_DIR, tiny.DRAFT_DIR) for file in directory.iterdir()]
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES


def test_chat_template_writes_the_form_it_was_trained_on() -> None:
    messages = [{"role": "system", "content": "A story."}, {"role": "user", "content": "Who is Tom?"}]
    template = ImmutableSandboxedEnvironment().from_string(tiny.chat_template())

    assert "A story.\nUser: Who is Tom?\nAssistant: " == template.render(messages=messages, add_generation_prompt=True)
    assert "A story.\nUser: Who is Tom?\n" == template.render(messages=messages, add_generation_prompt=False)
