"""The safetensors format: headers checked before any tensor is read, tensors read and written one at a time.

A file is the header's length (8 bytes, little endian), the header (JSON), and the tensors' bytes.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from upjax.errors import Problems

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
"""What weights may be; the others that the format knows are only measured."""

ITEM_BYTES = {name: 8 for name in ("F64", "I64", "U64", "C64")}
ITEM_BYTES |= {name: 4 for name in ("F32", "I32", "U32")}
ITEM_BYTES |= {name: 2 for name in ("F16", "BF16", "I16", "U16")}
ITEM_BYTES |= {name: 1 for name in ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")}

LONGEST_HEADER = 100_000_000
LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: its dtype by the format's name, its shape, and where its bytes begin in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns the given part; only the pages that hold it are read, and they are given back with the array."""
        if 0 in self.shape:
            return np.empty(self.shape, DTYPES[self.dtype])[slices]
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.start, self.shape)[slices]


def read_header(file: Path, problems: Problems) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name, without reading them; each fault is added to `problems`."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or LENGTH_BYTES + length > size or length > LONGEST_HEADER:
            problems.add(f"{file}: truncated or not safetensors: a header of {length} bytes in a file of {size} bytes")
            return {}
        text = stream.read(length)
    try:
        header = json.loads(text)
        spans = {
            name: (str(entry["dtype"]), tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problems.add(f"{file}: the header is not what safetensors writes: {error!r}")
        return {}
    begin, end = LENGTH_BYTES + length, 0
    for name, (dtype, shape, start, stop) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if start != end:
            problems.add(f"{file}: {name} begins at byte {start} of the data, where the tensors before it end at {end}")
        expected = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
        if dtype in ITEM_BYTES and stop - start != expected:
            problems.add(f"{file}: {name} has {stop - start} bytes; {dtype}{list(shape)} needs {expected}")
        end = stop
    if begin + end != size:
        fault = "truncated" if begin + end > size else "bytes past the last tensor"
        problems.add(f"{file}: {fault}: the header describes {begin + end} bytes, the file has {size}")
    return {
        name: StoredTensor(name=name, file=file, dtype=dtype, shape=shape, start=begin + start)
        for name, (dtype, shape, start, _) in spans.items()
    }


def write(file: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]], arrays: Iterable[np.ndarray]) -> None:
    """Writes tensors of the given (name, dtype, shape) from `arrays`, in the same order, taking one at a time."""
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(LENGTH_BYTES, "little"))
        stream.write(text)
        for (name, dtype, shape), array in zip(tensors, arrays, strict=True):
            assert (array.shape, array.dtype) == (shape, DTYPES[dtype]), (name, array.shape, array.dtype)
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def has_nonfinite(array: np.ndarray) -> bool:
    """Returns whether there is a NaN or an infinity."""
    if array.dtype == ml_dtypes.bfloat16:
        # All exponent bits set; numpy's own test of bfloat16 goes through float32 one element at a time.
        return bool(((array.view(np.uint16) & 0x7F80) == 0x7F80).any())
    return not np.isfinite(array).all()
