"""The command line with acceptance rules that are wrong on purpose: `python -m tests.e2e.broken_server serve`.

A test of laws is worth something if it fails here. Block verification and the token rule have their ratio the wrong
way round, the keyed rule takes a draft's first token unseen. (Smaller mistakes, as a weight forgotten in the residual
of block verification, are found by enumeration: twenty thousand samples are too few for them.)
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import core.model_runner
from app.cli import main
from core.decoding.speculative import VERIFICATION_RULES
from tests.core.decoding.plain_rules import plain_block_rule, plain_rule

honest = core.model_runner._accept_keyed


def trusting(request: Any, draft: Sequence[int], logits_KV: Any) -> list[int]:
    return [*draft[:1], *honest(request, draft, logits_KV)[len(draft[:1]) :]]


if __name__ == "__main__":
    VERIFICATION_RULES["block"] = partial(plain_block_rule, broken="ratio turned round")
    VERIFICATION_RULES["token"] = partial(plain_rule, broken="ratio turned round")
    core.model_runner._accept_keyed = trusting
    main()
