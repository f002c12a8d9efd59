"""Servers of the embedded model, as tests of public reports start them."""

from tests.reports.conftest import serve as serve
