"""A load generator for servers that speak OpenAI's API: a black-box client, independent of any engine."""
