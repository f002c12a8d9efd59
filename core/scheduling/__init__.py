"""Continuous batching: who computes how many tokens in which step. Integers only."""
