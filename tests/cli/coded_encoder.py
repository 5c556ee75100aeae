# SPDX-License-Identifier: MIT
"""A writer of coded files, written from docs/coded.md alone: legal, and unlike ours wherever the
page leaves something open.

The commonest symbols are not the first ones, values escape that need not, chunks stay plain that
would get smaller, and tensors lie in another order than before, with the table of chunks between
them.
"""
import json
import random
import struct
import zlib

from coded_decoder import CHUNK, KINDS, checksum, filled_up, header_of


def plane(numbers, width):
    """The bytes of a plane, filled up."""
    bits = 0
    for i, number in enumerate(numbers):
        bits |= number << i * width
    size = (len(numbers) * width + 7) // 8
    return bits.to_bytes(size, "little").ljust(filled_up(size), b"\0")


def encode_chunk(values, kind, chance, escaping):
    """(bytes, escapes) of a coded chunk."""
    width, mantissa, symbol_bits, widths = kind
    numbers = [int.from_bytes(values[i:i + width], "little") for i in range(0, len(values), width)]
    found = [number >> mantissa & (1 << symbol_bits) - 1 for number in numbers]
    rests = [number >> mantissa + symbol_bits << mantissa | number & (1 << mantissa) - 1
             for number in numbers]
    common = sorted(set(found), key=found.count, reverse=True)[:13]
    common += [11] * (13 - len(common))
    symbols = common[2::-1] + common[5:2:-1] + common[:5:-1]
    planes, low = [], 0
    for each in widths:
        planes.append(plane([rest >> low & (1 << each) - 1 for rest in rests], each))
        low += each
    a, b, c, d = [], [], [], bytearray()
    for symbol in found:
        places = [i for i, each in enumerate(symbols) if each == symbol]
        place = 13 if not places or chance.random() < escaping else places[-1]
        a.append(min(place, 3))
        if place >= 3:
            b.append(min(place - 3, 3))
        if place >= 6:
            c.append(min(place - 6, 7))
        if place >= 13:
            d.append(symbol)
    parts = [bytes(symbols).ljust(16, b"\0"), *planes, plane(a, 2), plane(b, 2), plane(c, 3),
             bytes(d).ljust(filled_up(len(d)), b"\0")]
    return b"".join(parts), (len(b), len(c), len(d))


def encode_tensor(values, kind, chance, wasteful):
    """(bytes, entries of the table) of a tensor."""
    stored, table = b"", b""
    size = CHUNK * kind[0]
    for first in range(0, len(values), size):
        chunk = values[first:first + size]
        here, escapes, how = chunk.ljust(filled_up(len(chunk)), b"\0"), (0, 0, 0), 0
        coded, counts = encode_chunk(chunk, kind, chance, 1 if wasteful else 0.05)
        if wasteful or len(coded) < len(here) and chance.random() < 0.8:
            here, escapes, how = coded, counts, 1
        stored += here
        table += struct.pack("<IHHHHI", checksum(chunk), *escapes, how, len(here))
    return stored, table


def encode(data, seed=0, wasteful=False):
    """A coded file of a safetensors file; a wasteful one has chunks that no writer may write."""
    chance = random.Random(seed)
    original, text, begin = header_of(data)
    metadata = original.pop("__metadata__", {})
    stored, table = {}, b""
    coded = [name for name, entry in original.items() if entry["dtype"] in KINDS
             and entry["data_offsets"][1] > entry["data_offsets"][0]]
    chance.shuffle(coded)
    for name in coded:
        low, high = original[name]["data_offsets"]
        content, entries = encode_tensor(data[begin + low:begin + high],
                                         KINDS[original[name]["dtype"]], chance, wasteful)
        stored[name] = "U8", [len(content)], content
        table += entries
    # All of these are multiples of 16, as what is coded must begin at one.
    stored["__penstock__"] = "U8", [len(table)], table
    order = list(stored)
    order.insert(chance.randrange(len(order)), order.pop())
    stored = {name: stored[name] for name in order}
    for name in reversed([name for name in original if name not in stored]):
        low, high = original[name]["data_offsets"]
        stored[name] = (original[name]["dtype"], original[name]["shape"],
                        data[begin + low:begin + high])
    header = {"__metadata__": {**metadata, "penstock.coded": "1", "penstock.header": text.decode(),
                               "penstock.bytes": str(len(data)),
                               "penstock.crc32": f"{zlib.crc32(data):08x}"}}
    at = 0
    for name, (dtype, shape, content) in stored.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    head = json.dumps(header).encode()
    head = head.ljust((len(head) + 8 + 4095) // 4096 * 4096 - 8)
    return struct.pack("<Q", len(head)) + head + b"".join(part[2] for part in stored.values())
