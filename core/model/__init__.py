"""Numerics only: weights, products, attention, the KV cache's arrays. Knows nothing of requests or scheduling."""
