"""How much there is in a JSON text, counted as its bytes come, before anybody parses it.

Bytes alone do not say what a body costs: 16 MB of one text are parsed in no time, 16 MB of small lists hold up the
event loop, and with it everybody's answers, for many seconds. Parsing elsewhere would not help, for the parser lets
no other thread run. What stands within strings is not counted.
"""

MAX_PARTS = 100_000  # lists, objects and keys: some microseconds each, until all of them are checked
MAX_VALUES = 2_000_000  # token ids, say: a tenth of one


class JsonSize:
    """Counts what has been fed. For what is no JSON the numbers mean nothing, and nobody needs them."""

    def __init__(self) -> None:
        self.num_parts = 0
        self.num_values = 0
        self._is_in_string = False
        self._rest = b""  # a backslash whose second half has not come

    def feed(self, piece: bytes) -> None:
        """The next bytes of the text, cut anywhere."""
        text = (self._rest + piece).replace(b"\\\\", b"")
        self._rest = b"\\" if text.endswith(b"\\") else b""
        spans = text.removesuffix(self._rest).replace(b'\\"', b"").split(b'"')
        outside = b"".join(spans[self._is_in_string :: 2])
        self._is_in_string ^= len(spans) % 2 == 0
        self.num_parts += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        self.num_values += outside.count(b",")

    @property
    def excess(self) -> str | None:
        """What there is too much of."""
        if self.num_parts > MAX_PARTS:
            return f"more than {MAX_PARTS} lists, objects and keys"
        return f"more than {MAX_VALUES} values" if self.num_values > MAX_VALUES else None
