# SPDX-License-Identifier: MIT
"""A decoder of coded files, written from docs/coded.md alone: slow, plain, and nobody else's code.

decode(bytes) gives the bytes of the original file, and checks whatever the page lets one check.
"""
import json
import struct
import zlib

CHUNK = 16384
#: dtype: (bytes of a value, bits of the mantissa, bits of the symbol, widths of the rest's planes)
KINDS = {
    "BF16": (2, 7, 8, (8,)),
    "F32": (4, 23, 8, (16, 8)),
    "F16": (2, 10, 5, (8, 2, 1)),
    "F8_E4M3": (1, 3, 4, (4,)),
    "F8_E4M3FNUZ": (1, 3, 4, (4,)),
    "F8_E5M2": (1, 2, 5, (2, 1)),
    "F8_E5M2FNUZ": (1, 2, 5, (2, 1)),
}
MASK = 0xFFFFFFFF


def header_of(data):
    """(header as a dict, its text, where the data begins)."""
    length, = struct.unpack_from("<Q", data)
    text = data[8:8 + length]
    return json.loads(text), text, 8 + length


def filled_up(size):
    return (size + 15) // 16 * 16


def plane(data, at, count, width):
    """The numbers of a plane, and where the next part begins."""
    size = (count * width + 7) // 8
    bits = int.from_bytes(data[at:at + size], "little")
    text = bits.to_bytes(size + 4, "little")
    numbers = []
    for i in range(count):
        byte, shift = divmod(i * width, 8)
        word = text[byte] | text[byte + 1] << 8 | text[byte + 2] << 16
        numbers.append(word >> shift & (1 << width) - 1)
    return numbers, at + filled_up(size)


def checksum(values):
    total = 0
    values += bytes(-len(values) % 4)
    for i, (word,) in enumerate(struct.iter_unpack("<I", values)):
        x = (word + i * 0x9E3779B1) & MASK
        x = (x ^ x >> 16) * 0x85EBCA6B & MASK
        x = (x ^ x >> 13) * 0xC2B2AE35 & MASK
        total += x
    return total & MASK


def decode_chunk(data, kind, count, escapes):
    width, mantissa, symbol_bits, widths = kind
    symbols, at = data[:13], 16
    rests, low = [0] * count, 0
    for each in widths:
        numbers, at = plane(data, at, count, each)
        rests = [rest | number << low for rest, number in zip(rests, numbers)]
        low += each
    a, at = plane(data, at, count, 2)
    b, at = plane(data, at, escapes[0], 2)
    c, at = plane(data, at, escapes[1], 3)
    d = iter(data[at:at + escapes[2]])
    assert at + filled_up(escapes[2]) == len(data)
    b, c = iter(b), iter(c)
    values = bytearray()
    for code, rest in zip(a, rests):
        symbol = symbols[code] if code < 3 else None
        if symbol is None:
            code = next(b)
            symbol = symbols[3 + code] if code < 3 else None
        if symbol is None:
            code = next(c)
            symbol = symbols[6 + code] if code < 7 else next(d)
        sign, fraction = rest >> mantissa, rest & (1 << mantissa) - 1
        value = sign << mantissa + symbol_bits | symbol << mantissa | fraction
        values += value.to_bytes(width, "little")
    assert next(b, None) is next(c, None) is next(d, None) is None
    return bytes(values)


def decode_tensor(data, kind, count, table):
    """The values of a tensor, from its bytes and an iterator over the table of chunks."""
    values, at = b"", 0
    for first in range(0, count, CHUNK):
        here = min(CHUNK, count - first)
        wanted, a, b, c, how, size = struct.unpack("<IHHHHI", next(table))
        stored = data[at:at + size]
        if how == 0:
            assert (a, b, c) == (0, 0, 0) and size == filled_up(here * kind[0])
            chunk = stored[:here * kind[0]]
        else:
            assert how == 1
            chunk = decode_chunk(stored, kind, here, (a, b, c))
        assert checksum(chunk) == wanted
        values += chunk
        at += size
    assert at == len(data)
    return values


def decode(data):
    """The original file."""
    header, _, begin = header_of(data)
    metadata = header.pop("__metadata__")
    assert metadata["penstock.coded"] == "1" and begin % 4096 == 0
    text = metadata["penstock.header"].encode()
    original = json.loads(text)
    original.pop("__metadata__", None)
    first, last = header.pop("__penstock__")["data_offsets"]
    table = data[begin + first:begin + last]
    table = iter([table[i:i + 16] for i in range(0, len(table), 16)])
    assert header.keys() == original.keys()
    out = bytearray(int(metadata["penstock.bytes"]))
    out[:8 + len(text)] = struct.pack("<Q", len(text)) + text
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        stored = data[begin + first:begin + last]
        was = original[name]
        if (entry["dtype"], entry["shape"]) != (was["dtype"], was["shape"]):
            assert entry["dtype"] == "U8" and entry["shape"] == [len(stored)]
            assert (begin + first) % 16 == 0
            kind, (low, high) = KINDS[was["dtype"]], was["data_offsets"]
            stored = decode_tensor(stored, kind, (high - low) // kind[0], table)
        low, high = was["data_offsets"]
        assert len(stored) == high - low
        out[8 + len(text) + low:8 + len(text) + high] = stored
    assert next(table, None) is None
    assert f"{zlib.crc32(out):08x}" == metadata["penstock.crc32"]
    return bytes(out)
