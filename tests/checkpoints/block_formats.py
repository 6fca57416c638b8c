"""A second decoder of quantised GGUF blocks: scalar, slow, from the format alone."""

import numpy as np

# Name: type id, values a block, bytes a block, and where its float16 numbers begin.
FORMATS = {
    "Q4_0": (2, 32, 18, (0,)),
    "Q4_1": (3, 32, 20, (0, 2)),
    "Q5_0": (6, 32, 22, (0,)),
    "Q5_1": (7, 32, 24, (0, 2)),
    "Q8_0": (8, 32, 34, (0,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q5_K": (13, 256, 176, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
}


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes `[rows, bytes]` in which only the float16 fields are tame."""
    _, values, size, halves = FORMATS[name]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // values, size), np.uint8)
    for offset in halves:
        numbers = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def decode(name: str, raw: np.ndarray) -> np.ndarray:
    """Float64 values of stored rows."""
    blocks = raw.reshape(-1, FORMATS[name][2])
    decoded = [_DECODERS[name](bytes(block)) for block in blocks]
    return np.array(decoded).reshape(len(raw), -1)


def _half(block: bytes, offset: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, offset)[0])


def _four_bit(block: bytes, offset: int) -> list[int]:
    nibbles = block[offset : offset + 16]
    return [byte & 15 for byte in nibbles] + [byte >> 4 for byte in nibbles]


def _five_bit(block: bytes, offset: int) -> list[int]:
    high = int.from_bytes(block[offset : offset + 4], "little")
    low = _four_bit(block, offset + 4)
    return [q + 16 * (high >> i & 1) for i, q in enumerate(low)]


def _q4_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (q - 8) for q in _four_bit(block, 2)]


def _q4_1(block: bytes) -> list[float]:
    return [_half(block, 0) * q + _half(block, 2) for q in _four_bit(block, 4)]


def _q5_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (q - 16) for q in _five_bit(block, 2)]


def _q5_1(block: bytes) -> list[float]:
    return [_half(block, 0) * q + _half(block, 2) for q in _five_bit(block, 4)]


def _q8_0(block: bytes) -> list[float]:
    return [_half(block, 0) * q for q in np.frombuffer(block, np.int8, 32, 2).tolist()]


def _scale_and_minimum(scales: bytes, part: int) -> tuple[int, int]:
    """Two 6-bit numbers of a part: eight of each are packed into twelve bytes."""
    if part < 4:
        return scales[part] & 63, scales[part + 4] & 63
    packed = scales[part + 4]
    return (
        packed & 15 | scales[part - 4] >> 6 << 4,
        packed >> 4 | scales[part] >> 6 << 4,
    )


def _k_quant(block: bytes, low_at: int, high_at: int | None) -> list[float]:
    values = []
    for part in range(8):
        scale, minimum = _scale_and_minimum(block[4:16], part)
        for i in range(32):
            byte = block[low_at + 32 * (part // 2) + i]
            q = byte >> 4 if part % 2 else byte & 15
            if high_at is not None:
                q += 16 * (block[high_at + i] >> part & 1)
            values.append(_half(block, 0) * scale * q - _half(block, 2) * minimum)
    return values


def _q4_k(block: bytes) -> list[float]:
    return _k_quant(block, 16, None)


def _q5_k(block: bytes) -> list[float]:
    return _k_quant(block, 48, 16)


def _q6_k(block: bytes) -> list[float]:
    values = []
    for i in range(256):
        half, quarter, at = i // 128, i // 32 % 4, i % 32
        low = block[64 * half + 32 * (quarter % 2) + at]
        low = low >> 4 if quarter >= 2 else low & 15
        high = block[128 + 32 * half + at] >> 2 * quarter & 3
        scale = np.frombuffer(block, np.int8, 16, 192)[i // 16]
        values.append(_half(block, 208) * int(scale) * (low + 16 * high - 32))
    return values


_DECODERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
