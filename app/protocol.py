"""uvicorn's protocol, bounded where it is not: by how long a request's line and headers may be.

Its parser keeps what has come of a head until the head is whole, so whoever never ends one would fill the memory, and
each piece of it takes the event loop longer than the one before. No middleware sees a request before that.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Beyond the first piece that the transport hands over, which may hold the end of another request before it.
MAX_HEAD_BYTES = 2**16
_REFUSAL = (
    b"""{"error": {"message": "The headers are longer than %d bytes", "type": "invalid_request_error", \
"param": null, "code": null}}"""
    % MAX_HEAD_BYTES
)


class BoundedHeads(HttpToolsProtocol):
    """431 for a head that grows without end, and the connection is closed: nobody knows where a next request begins."""

    _is_in_head = False
    _num_head_bytes = 0

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # or it would stand in the middle of an answer
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            rest = b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)
            self.transport.write(head + rest)
        self.transport.close()
