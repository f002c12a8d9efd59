"""The embedded model `octavo-tiny`: where its trained weights lie in the package. `tools/train_tiny.py` made them."""

from pathlib import Path

_HERE = Path(__file__).parent

TARGET_DIR = _HERE / "target"
DRAFT_DIR = _HERE / "draft"


def chat_template() -> str:
    """The Jinja source by which its chat prompts are written."""
    return (_HERE / "chat_template.jinja").read_text(encoding="utf-8")
