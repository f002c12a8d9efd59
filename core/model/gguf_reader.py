"""The package's reader of GGUF files, made safe for damaged ones.

It believes every length in the file: past the end it goes on reading nothing, until memory is full. Here whatever is
not in the file is an error, and an array of numbers is read in one piece rather than number by number.
"""

from typing import Any, Literal

import numpy as np
from gguf import GGUFReader, GGUFValueType
from numpy.typing import DTypeLike, NDArray


class BoundedReader(GGUFReader):
    """Raises ValueError where the file ends too early."""

    @property  # type: ignore[override]
    def data(self) -> NDArray[np.uint8]:
        """The mapped file."""
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = np.asarray(mapped)  # slices of an np.memmap, of which we take many, cost several times as much

    def _get(
        self,
        offset: int,
        dtype: DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> NDArray[Any]:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes, {end} are needed")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[GGUFValueType]]:
        """Bytes taken, parts, which parts hold the values, and their types."""
        if raw_type == GGUFValueType.ARRAY:
            raw_kind = self._get(orig_offs, np.uint32)
            kind = GGUFValueType(raw_kind[0])
            if (dtype := self.gguf_scalar_to_np.get(kind)) is not None:
                length = self._get(orig_offs + 4, np.uint64)
                values = self._get(orig_offs + 12, dtype, length[0])
                return 12 + values.nbytes, [raw_kind, length, values], [2], [GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)
