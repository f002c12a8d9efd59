"""Octavo beside other engines: the same weights, the same prompts, the same client, on the same cores, in turn."""
