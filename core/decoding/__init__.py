"""From logits to tokens: laws, noise, drafts and their acceptance. Knows no scheduling."""
