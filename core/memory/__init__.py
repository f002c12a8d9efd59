"""The paged KV cache, as integers: blocks and tables. No NumPy here."""
