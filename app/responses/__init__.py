"""OpenAI's Responses API, as a translation: input items become messages, the answer's parts become output items.

Nothing is stored: `store` is taken and answered with false, and what would need a store is refused by name.
"""
