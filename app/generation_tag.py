"""The tag {% generation %}: templates of models mark with it what the assistant says, so that training finds it.

Here it marks nothing; what stands inside is rendered. As in transformers, what is set inside is not known outside.
"""

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """For an environment's `extensions`."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
