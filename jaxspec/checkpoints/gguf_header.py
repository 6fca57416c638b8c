"""The header of a GGUF file, read with every length checked against the file.

The `gguf` package's own reader builds two array objects for each string of the
vocabulary (480 MB and 6 seconds for a 152k vocabulary) and believes the counts of the
file; its type tables and its dequantiser are used, its reader is not.
"""

import dataclasses
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints.fields import shown
from jaxspec.errors import UserError

_VERSIONS = (2, 3)
# By the value type's id: the struct code of a scalar, or None for text and arrays.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 2**16
_MOST_ELEMENTS = 2**24
_LONGEST_NAME = 2**16
_DEFAULT_ALIGNMENT = 32


class _Corrupt(ValueError):
    """What is wrong with the file, for the message."""


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array of the metadata, decoded on request: a vocabulary is large."""

    count: int
    _type: int
    _data: mmap.mmap = dataclasses.field(repr=False)
    _offset: int

    def read(self) -> list[Any]:
        """The elements, as `str`, `int`, `float` or `bool`.

        Raises:
            UserError: text that is not UTF-8.
        """
        cursor = _Cursor(self._data, self._offset)
        if self._type == _STRING:
            try:
                return [cursor.text() for _ in range(self.count)]
            except _Corrupt as error:
                raise UserError(f"GGUF metadata: {error}") from None
        return list(cursor.take(f"{self.count}{_SCALARS[self._type]}"))


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is `[out, in]`, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    row_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensor table of a GGUF file that stays mapped.

    Attributes:
        metadata: by key: `str`, `int`, `float`, `bool` or `LazyArray`.
        tensors: by the file's names.
    """

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: mmap.mmap = dataclasses.field(repr=False)

    def bytes_of(self, tensor: TensorInfo) -> np.ndarray:
        """The stored bytes, `[rows, row_bytes]` uint8, not copied."""
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        flat = np.frombuffer(
            self.data, np.uint8, rows * tensor.row_bytes, tensor.offset
        )
        return flat.reshape(rows, tensor.row_bytes)


def read_header(path: Path) -> GgufHeader:
    """Reads the header of a GGUF file (versions 2 and 3, little-endian).

    Raises:
        UserError: not such a file, or one that is truncated or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        metadata, tensors = _parse(data)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(
            f"{path}: not a sound GGUF file ({error}): download it again"
        ) from None
    return GgufHeader(str(path), metadata, tensors, data)


class _Cursor:
    """Reads little-endian values one after the other, never past the end."""

    def __init__(self, data: mmap.mmap, offset: int = 0):
        self.data = data
        self.offset = offset

    def take(self, codes: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + codes)
        self.require(layout.size)
        values = layout.unpack_from(self.data, self.offset)
        self.offset += layout.size
        return values

    def require(self, size: int) -> None:
        if size > len(self.data) - self.offset:
            raise _Corrupt(f"it ends at byte {len(self.data)}, inside its header")

    def raw(self) -> bytes:
        (length,) = self.take("Q")
        self.require(length)
        self.offset += length
        return self.data[self.offset - length : self.offset]

    def text(self) -> str:
        try:
            return self.raw().decode()
        except UnicodeDecodeError:
            raise _Corrupt("a text in it is not UTF-8") from None

    def name(self, seen: Mapping[str, Any]) -> str:
        name = self.text()
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise _Corrupt("a name in it is not printable")
        if name in seen:
            raise _Corrupt(f"{shown(name)} occurs twice")
        return name


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor = _Cursor(data)
    magic, version = cursor.take("4sI")
    if magic != b"GGUF":
        raise _Corrupt("it does not begin with GGUF")
    if version not in _VERSIONS:
        raise _Corrupt(f"version {version}, expected 2 or 3, little-endian")
    tensor_count, metadata_count = cursor.take("QQ")
    if max(tensor_count, metadata_count) > _MOST_ENTRIES:
        raise _Corrupt(f"it claims {tensor_count} tensors, {metadata_count} entries")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.name(metadata)
        metadata[key] = _value(cursor, *cursor.take("I"))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Corrupt(f"its alignment is {shown(alignment)}, not a power of two")
    return metadata, _tensor_table(cursor, tensor_count, alignment)


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text()
    if kind == _ARRAY:
        return _array(cursor)
    if kind not in _SCALARS:
        raise _Corrupt(f"a value in it has type {kind}, which is none of GGUF's")
    return cursor.take(_SCALARS[kind])[0]


def _array(cursor: _Cursor) -> LazyArray:
    kind, count = cursor.take("IQ")
    if count > _MOST_ELEMENTS or (kind != _STRING and kind not in _SCALARS):
        raise _Corrupt(f"an array in it has {count} elements of type {kind}")
    array = LazyArray(count, kind, cursor.data, cursor.offset)
    if kind == _STRING:
        _skip_strings(cursor, count)
    else:
        size = count * struct.calcsize("<" + _SCALARS[kind])
        cursor.require(size)
        cursor.offset += size
    return array


def _skip_strings(cursor: _Cursor, count: int) -> None:
    # The one hot loop of a header, so it goes round `take` and its checks per value.
    unpack, data, offset = struct.Struct("<Q").unpack_from, cursor.data, cursor.offset
    end = len(data) - 8
    for _ in range(count):
        if offset > end:
            raise _Corrupt(f"it ends at byte {len(data)}, inside its header")
        offset += 8 + unpack(data, offset)[0]
    cursor.require(offset - cursor.offset)
    cursor.offset = offset


def _tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.name(entries)
        (axes,) = cursor.take("I")
        if not 1 <= axes <= 4:
            raise _Corrupt(f"tensor {shown(name)} has {axes} axes")
        shape = cursor.take(f"{axes}Q")[::-1]
        entries[name] = (shape, *cursor.take("IQ"))
    start = -(-cursor.offset // alignment) * alignment
    infos = _infos(entries, start, alignment)
    return {info.name: _inside(info, len(cursor.data)) for info in infos}


def _infos(
    entries: Mapping[str, tuple[tuple[int, ...], int, int]], start: int, alignment: int
) -> Iterator[TensorInfo]:
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    for name, (shape, type_id, offset) in entries.items():
        type_name, block, size = sizes.get(type_id, (f"type {type_id}", 1, 1))
        if shape[-1] % block or offset % alignment:
            raise _Corrupt(f"tensor {shown(name)} is not aligned to its blocks")
        row_bytes = shape[-1] // block * size
        yield TensorInfo(name, shape, type_id, type_name, start + offset, row_bytes)


def _inside(info: TensorInfo, file_size: int) -> TensorInfo:
    """A tensor with every axis at least one and all bytes within the file."""
    rows = 1
    for axis in info.shape[:-1]:
        rows *= axis
    end = info.offset + rows * info.row_bytes
    if min(info.shape) < 1 or end > file_size:
        raise _Corrupt(
            f"tensor {shown(info.name)} would end at byte {end} of {file_size}"
        )
    return info
