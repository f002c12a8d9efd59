"""Says so, once, when kernels have to be compiled: nothing else tells why the first start with a dtype takes so long.

Numba reports what it did not find among the code it keeps; to look there beforehand would be to guess at its files.
"""

import logging

from numba.core import event

logger = logging.getLogger(__name__)


class _Announcer(event.Listener):
    """Of the first kernel; those that it calls are reported as well, before it is done."""

    def __init__(self) -> None:
        self._is_said = False

    def on_start(self, event: object) -> None:
        if not self._is_said:
            self._is_said = True
            logger.info("compiling kernels for this machine, once: about half a minute for each --dtype")

    def on_end(self, event: object) -> None:
        """That it is done shows in what comes next."""


event.register("numba:compile", _Announcer())
