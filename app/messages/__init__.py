"""Anthropic's Messages API, as a translation: content blocks become messages, the answer's parts content blocks."""
