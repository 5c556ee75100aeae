# SPDX-License-Identifier: MIT
"""The same files, good and bad, judged by the safetensors package and by the C library.

Both must take or refuse the same ones, and of those that are taken, names, dtypes, shapes, bytes
and metadata must be equal. The library is called through ctypes: the plain build's, or the one that
PENSTOCK_LIBRARY names. PENSTOCK_PEER_CASES says how many random headers are judged, where some
thousand are too few; each has its own seed, which a failure tells.
"""
import ctypes
import json
import os
import random
import struct
from pathlib import Path
from typing import Any, Iterable, Iterator, NamedTuple

import pytest

safetensors = pytest.importorskip("safetensors")

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = Path(os.environ.get("PENSTOCK_LIBRARY", ROOT / "build/libpenstock.so")).resolve()
if not LIBRARY.exists():
    pytest.skip(f"{LIBRARY} is not built", allow_module_level=True)

BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8,
        "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16,
        "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
        "U64": 64}


# ------------------------------------------------------------------------------- the library --

class PenError(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("domain", ctypes.c_int), ("raw", ctypes.c_int),
                ("offset", ctypes.c_int64), ("operation", ctypes.c_char * 32),
                ("object", ctypes.c_char * 256), ("message", ctypes.c_char * 256),
                ("hint", ctypes.c_char * 256)]


class PenTensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("dtype", ctypes.c_int), ("rank", ctypes.c_uint32),
                ("shape", ctypes.POINTER(ctypes.c_uint64)), ("bytes", ctypes.c_uint64),
                ("file", ctypes.c_uint32), ("offset", ctypes.c_uint64),
                ("name_length", ctypes.c_size_t), ("reserved", ctypes.c_uint64 * 3)]


class PenMetadata(ctypes.Structure):
    _fields_ = [("key", ctypes.c_void_p), ("value", ctypes.c_void_p),
                ("key_length", ctypes.c_size_t), ("value_length", ctypes.c_size_t),
                ("reserved", ctypes.c_uint64 * 2)]


class PenModelFile(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char_p), ("name", ctypes.c_char_p), ("size", ctypes.c_uint64),
                ("data", ctypes.c_uint64), ("metadata_count", ctypes.c_size_t),
                ("metadata", ctypes.POINTER(PenMetadata)), ("object", ctypes.c_void_p),
                ("reserved", ctypes.c_uint64 * 4)]


def open_library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.pen_model_open.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p),
                                       ctypes.POINTER(PenError)]
    library.pen_model_tensors.argtypes = [ctypes.c_void_p,
                                          ctypes.POINTER(ctypes.POINTER(PenTensor))]
    library.pen_model_tensors.restype = ctypes.c_size_t
    library.pen_model_files.argtypes = [ctypes.c_void_p,
                                        ctypes.POINTER(ctypes.POINTER(PenModelFile))]
    library.pen_model_files.restype = ctypes.c_size_t
    library.pen_model_close.argtypes = [ctypes.c_void_p]
    library.pen_dtype_name.restype = ctypes.c_char_p
    return library


PEN = open_library()


class Tensor(NamedTuple):
    dtype: str
    shape: list[int]
    offset: int
    bytes: int


class Verdict(NamedTuple):
    """What a judge says of a file; `words` where it is refused."""
    taken: bool
    words: str = ""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] | None = None


def text(address: int, length: int) -> str:
    """A text that may hold a NUL, and has one after its end."""
    found = ctypes.string_at(address, length + 1)
    assert found[-1] == 0
    return found[:-1].decode()


def ours(path: Path) -> Verdict:
    """What the C library says."""
    model, error = ctypes.c_void_p(), PenError()
    if PEN.pen_model_open(bytes(path), ctypes.byref(model), ctypes.byref(error)):
        assert error.message and error.hint and error.object == bytes(path)
        assert error.domain == 3, error.message
        return Verdict(False, error.message.decode(errors="replace"))
    table, files = ctypes.POINTER(PenTensor)(), ctypes.POINTER(PenModelFile)()
    count = PEN.pen_model_tensors(model, ctypes.byref(table))
    assert PEN.pen_model_files(model, ctypes.byref(files)) == 1
    tensors = {text(t.name, t.name_length): Tensor(PEN.pen_dtype_name(t.dtype).decode(),
                                                   t.shape[:t.rank], t.offset, t.bytes)
               for t in table[:count]}
    offsets = [t.offset for t in table[:count]]
    assert len(tensors) == count and offsets == sorted(offsets)
    metadata = None
    if files[0].metadata:
        pairs = files[0].metadata[:files[0].metadata_count]
        metadata = {text(m.key, m.key_length): text(m.value, m.value_length) for m in pairs}
        assert len(metadata) == len(pairs)
    PEN.pen_model_close(model)
    return Verdict(True, "", tensors, metadata)


def theirs(path: Path, data: bytes) -> Verdict:
    """What the safetensors package says; its two ways to read a file must agree."""
    try:
        listed = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(path, "np").__enter__()
        return Verdict(False, str(error))
    with safetensors.safe_open(path, "np") as opened:
        metadata = opened.metadata()
        assert sorted(opened.keys()) == sorted(name for name, _ in listed)
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start], parse_int=lambda digits: int(digits[:20]))
    tensors = {}
    for name, entry in listed:
        said = header[name] if isinstance(header[name], dict) else {
            "data_offsets": header[name][2]}
        offset = start + said["data_offsets"][0]
        assert bytes(entry["data"]) == data[offset:offset + len(entry["data"])]
        tensors[name] = Tensor(entry["dtype"], list(entry["shape"]), offset, len(entry["data"]))
    return Verdict(True, "", tensors, metadata)


# --------------------------------------------------------------------------------- the judges --

def judge(tmp_path: Path, files: Iterable[tuple[str, bytes]], refused: bool | None = None) -> None:
    """Ask both about every file; `refused` says what both must answer, where that is known."""
    path = tmp_path / "judged.safetensors"
    count = [0, 0]
    for label, data in files:
        path.write_bytes(data)
        their, our = theirs(path, data), ours(path)
        assert their.taken == our.taken, (
            f"{label}: they {'take' if their.taken else 'refuse'} it, we do not: "
            f"{their.words or our.words}\n{data[:600]!r}")
        assert refused is None or refused != our.taken, f"{label}: {our.words}\n{data[:600]!r}"
        assert our.tensors == their.tensors and our.metadata == their.metadata, (
            f"{label}\n{data[:600]!r}")
        count[our.taken] += 1
    assert refused is not None or min(count) > 5, f"{count[0]} refused, {count[1]} taken"


# --------------------------------------------------------------------------------- the files --

def build(header: Any, data: int | bytes = 0, length: int | None = None) -> bytes:
    """A file: its header as an object, a text or bytes, and data or how much of it."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    if isinstance(data, int):
        data = random.Random(data).randbytes(data)
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(dtype: str = "U8", shape: Any = (1,), begin: int = 0, end: int | None = None) -> dict:
    """A header's entry, right unless told otherwise."""
    if end is None:
        count = 1
        for size in shape:
            count *= size
        end = begin + count * BITS[dtype] // 8
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def random_header(rng: random.Random) -> tuple[dict, int]:
    """Some tensors side by side, named and listed in any order."""
    header, at, made = {}, 0, []
    for _ in range(rng.randrange(5)):
        dtype = rng.choice(list(BITS))
        shape = [rng.choice((0, 1, 2, 3, 8)) for _ in range(rng.randrange(4))] + [8]
        entry = tensor(dtype, shape, at)
        at = entry["data_offsets"][1]
        made.append(("".join(rng.choices("ab.\u20ac\U0001f600\"\\/\n", k=6)), entry))
    rng.shuffle(made)
    header.update(made)
    if len(header) < len(made):
        return random_header(rng)
    if rng.random() < 0.3:
        header["__metadata__"] = {"format": "pt", rng.choice("xyz"): "\u00e9"}
    return header, at


def spoil_field(rng: random.Random, header: dict) -> None:
    """Change one thing in one entry: a number, a type, a missing field."""
    names = [name for name in header if name != "__metadata__"]
    if not names:
        header["__metadata__"] = rng.choice(([], 1, "x", None, {"a": 1}, {"a": None}, {"a": "b"}))
        return
    entry = header[rng.choice(names)]
    field = rng.choice(("dtype", "shape", "data_offsets"))
    action = rng.randrange(5)
    if action == 0:
        del entry[field]
    elif action == 1:
        entry[field] = rng.choice((None, 1, "F32", [], [0], [0, 0], {}, True, 1.5, "bf16", "I4"))
    elif action == 2:
        entry["more"] = rng.choice((None, [1, {"x": 2}], "text", 1e300, -1))
    elif entry["shape"] and rng.random() < 0.5:
        where = rng.randrange(len(entry["shape"]))
        entry["shape"][where] = rng.choice((0, 1, 7, 8, -1, 2**31, 2**62, 2**63 - 1, 1.0, "1", None,
                                            True, 2**64))
    else:
        where = rng.randrange(2)
        old = entry["data_offsets"][where]
        entry["data_offsets"][where] = rng.choice((old, old + 1, old - 1, 0, -1, 2**62, 1.0, "0",
                                                   None, 2**63 - 1, [old]))


def spoil_bytes(rng: random.Random, text: bytes) -> bytes:
    """Change, drop or add a few bytes."""
    text = bytearray(text)
    for _ in range(rng.randrange(1, 3)):
        where = rng.randrange(len(text))
        action = rng.randrange(4)
        if action == 0:
            text[where] ^= 1 << rng.randrange(8)
        elif action == 1:
            del text[where:where + rng.randrange(1, 4)]
        elif action == 2:
            text[where:where] = rng.choice((b" ", b"\n", b"0", b"-", b"1", b",", b'"', b"{", b"}",
                                            b"\\", b"\\u0041", b"\xc3\xa9", b"\xff", b"null", b"e1",
                                            b".0", b"\t", b"\0", b"[", b"]", b"\\u0000"))
        elif text[where:where + 1].isdigit():
            text[where] = rng.choice(b"0123456789")
        if not text:
            break
    return bytes(text)


ONE = json.dumps(tensor())

GOOD_NUMBERS = ["-0", "-0.0", "1.5", "1E+5", "1e-999999999999", "0e999999999999", "1e308", "-1e308",
                "18446744073709551615", "18446744073709551616", "-9223372036854775809",
                "17976931348623157e292", "0.0001e311", "1" + "0" * 308, "0." + "0" * 400 + "1e500"]
BAD_NUMBERS = ["1e309", "-1e309", "17976931348623158e292", "17976931348623157" + "9" * 292,
               "1e999999999999", "1" + "0" * 309, "223456789012345678901e288", "-", "1.", ".1",
               "+1", "1e", "1e+", "1.e1", "--1", "00", "-01", "0x1", "1_0", "Infinity", "NaN"]


class Odd:
    """Writes headers as nobody would, but most of them in ways that are allowed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.wildness = self.rng.choice((0, 0.02, 0.1, 0.3))

    def chance(self) -> bool:
        return self.rng.random() < self.wildness

    def space(self) -> str:
        return "".join(self.rng.choices(" \n\t\r", k=self.rng.randrange(3) * self.chance()))

    def text(self, plain: str) -> str:
        return '"' + "".join(map(self.letter, plain)) + '"'

    def letter(self, letter: str) -> str:
        if letter in '"\\' or letter < " " or self.chance():
            escaped = json.dumps(letter)[1:-1]
            if len(escaped) == 1:
                escaped = f"\\u{ord(letter):04x}"
            return escaped.upper().replace("\\U", "\\u") if escaped[1] == "u" and self.chance() \
                else escaped
        return letter

    def many(self, opening: str, parts: list[str], closing: str) -> str:
        between = [self.space() + part + self.space() for part in parts]
        return opening + (",".join(between) or self.space()) + closing

    def pair(self, key: str, value: str) -> str:
        return self.text(key) + self.space() + ":" + self.space() + value

    def anything(self, depth: int = 0) -> str:
        kind = self.rng.randrange(7 if depth < 4 else 5)
        if kind == 0:
            return self.rng.choice(("true", "false", "null"))
        if kind < 3:
            return self.number()
        if kind < 5:
            return self.text(self.name())
        parts = [self.anything(depth + 1) for _ in range(self.rng.randrange(4))]
        if kind == 5:
            return self.many("[", parts, "]")
        return self.many("{", [self.pair(self.name(), part) for part in parts], "}")

    def number(self) -> str:
        if self.rng.random() < 0.5:
            return self.rng.choice(GOOD_NUMBERS + (BAD_NUMBERS if self.chance() else []))
        digits = str(self.rng.randrange(10 ** self.rng.randrange(1, 25)))
        return "".join((self.rng.choice(("", "-")), digits,
                        self.rng.choice(("", "", ".5", ".000")),
                        self.rng.choice(("", "", "e5", "E-300", "e+287"))))

    def name(self) -> str:
        letters = "ab.\0\n\"\\/\x7f\u00e9\u20ac\ud7ff\uffff\U0001f600\U0010ffff"
        return "".join(self.rng.choices(letters, k=self.rng.randrange(5)))

    def whole(self, value: int) -> str:
        if not self.chance():
            return str(value)
        return self.rng.choice((str(value), str(value + 1), f"{value}.0", f"-{value}",
                                f"{value}e0", f'"{value}"', "null", "18446744073709551615",
                                f"[{value}]", f"0{value}"))

    def entry(self, described: dict) -> str:
        dtype = self.text(described["dtype"] if not self.chance() else self.rng.choice(
            ("F32", "U8", "u8", "F33", "")))
        if self.chance():
            dtype = self.rng.choice(("{%s:null}", "{ %s : null }", "{%s:null,%s:null}", "{%s:{}}",
                                     "[%s]", "{}")).replace("%s", dtype)
        shape = self.many("[", [self.whole(n) for n in described["shape"]], "]")
        offsets = self.many("[", [self.whole(n) for n in described["data_offsets"]], "]")
        fields = [dtype, shape, offsets]
        if self.chance():
            if self.chance():
                fields.insert(self.rng.randrange(4), self.anything())
            return self.many("[", fields[:self.rng.choice((3, 3, 3, 4, 2))], "]")
        pairs = [self.pair(name, field) for name, field in zip(("dtype", "shape", "data_offsets"),
                                                               fields)]
        self.rng.shuffle(pairs)
        while self.chance():
            more = self.pair(self.name(), self.anything())
            pairs.insert(self.rng.randrange(len(pairs) + 1), more)
        if self.wildness * self.rng.random() > 0.2:
            pairs.append(self.rng.choice(pairs))
        return self.many("{", pairs, "}")

    def metadata(self) -> str:
        if self.chance():
            return self.rng.choice(("null", "{}", "[]", '""', "nul"))
        pairs = [self.pair(self.name(), self.text(self.name()) if not self.rng.random() < 0.05
                           else self.anything()) for _ in range(self.rng.randrange(5))]
        return self.many("{", pairs, "}")

    def header(self) -> tuple[str, int]:
        described, size = random_header(self.rng)
        described.pop("__metadata__", None)
        pairs = [self.pair(self.rng.choice((name, name + self.name())), self.entry(entry))
                 for name, entry in described.items()]
        if pairs and self.chance():
            # One before its like, of which only the form counts.
            wrong = tensor("F32", (3,), self.rng.randrange(9), 1)
            pairs.insert(0, self.pair(self.rng.choice(list(described)), self.entry(wrong)))
        while self.rng.random() < 0.3:
            pairs.insert(self.rng.randrange(len(pairs) + 1), self.pair("__metadata__",
                                                                       self.metadata()))
        return self.space() + self.many("{", pairs, "}") + self.space(), size


def odd_file(seed: int) -> tuple[str, bytes]:
    """A file of one seed: oddly spelled, some of them with spoiled bytes as well."""
    odd = Odd(seed)
    text, size = odd.header()
    header = text.encode()
    if odd.rng.random() < 0.3:
        header = spoil_bytes(odd.rng, header)
    return f"seed {seed}", build(header, size)


# --------------------------------------------------------------------------------- the tests --

def test_every_dtype_with_many_shapes(tmp_path):
    shapes = [(), (0,), (8,), (1, 8), (2, 4), (0, 3, 8), (3, 8, 0), (2, 2, 2, 2), (1,) * 7 + (8,)]
    judge(tmp_path, ((f"{dtype} {shape}", build({"a": entry}, entry["data_offsets"][1]))
                     for dtype in BITS for shape in shapes
                     for entry in [tensor(dtype, shape)] if shape or BITS[dtype] % 8 == 0),
          refused=False)


def test_every_dtype_with_a_wrong_size(tmp_path):
    def files() -> Iterator[tuple[str, bytes]]:
        for dtype in BITS:
            right = 8 * BITS[dtype] // 8
            for end in {0, 1, right - 1, right + 1, 2 * right, 8, 16} - {right}:
                yield f"{dtype} {end}", build({"a": tensor(dtype, (8,), 0, end)}, end)
        for dtype in ("F4", "F6_E2M3", "F6_E3M2"):
            for count in (1, 3, 5, 7):
                for end in range(8):
                    yield f"{dtype} {count}", build({"a": tensor(dtype, (count,), 0, end)}, end)
    judge(tmp_path, files(), refused=True)


def test_dtypes_that_do_not_exist(tmp_path):
    names = ["", "f32", "F32 ", "F128", "I4", "U4", "F8_E4M3FN", "float32", "BF16\n", "F32\\u0000"]
    judge(tmp_path, [(name, build('{"a":{"dtype":"%s","shape":[1],"data_offsets":[0,4]}}'
                                  % name.replace("\n", "\\n"), 4)) for name in names], refused=True)


def test_the_bytes_before_the_header(tmp_path):
    whole = build({"a": tensor()}, 1)
    files = [(f"cut at {size}", whole[:size]) for size in range(len(whole))]
    files += [(f"length {length}", build({}, 0, length))
              for length in (0, 1, 3, 10, 99_999_999, 100_000_000, 100_000_001, 2**31, 2**63,
                             2**64 - 8, 2**64 - 1)]
    files += [("longer", whole + b"x"), ("much longer", whole + bytes(1000))]
    judge(tmp_path, files, refused=True)


def test_files_that_are_whole(tmp_path):
    files = [("empty", build({})), ("padded", build("{}" + " " * 100)),
             ("white", build("{\n\t\r }\n")), ("one", build({"a": tensor()}, 1)),
             ("metadata", build({"__metadata__": {"a": "b", "": ""}})),
             ("no metadata", build('{"__metadata__":null}')),
             ("empty name", build({"": tensor()}, 1)),
             ("escapes", build('{"\\u00e9\\ud83d\\ude00\\"\\\\\\/\\b":%s}' % ONE, 1)),
             ("deep", build('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":%s}}'
                            % ("[" * 125 + "]" * 125), 1))]
    files += [(f"padded by {n}", build('{"a":%s}%s' % (json.dumps(tensor("F64")), " " * n), 8))
              for n in range(16)]
    judge(tmp_path, files, refused=False)


def test_places_of_tensors(tmp_path):
    """All pairs of places of two tensors in a file of four bytes, in both orders of listing."""
    places = [(begin, end) for begin in range(5) for end in range(5)]

    def files() -> Iterator[tuple[str, bytes]]:
        for first in places:
            for second in places:
                header = {name: tensor("U8", (max(end - begin, 0),), begin, end)
                          for name, (begin, end) in (("b", first), ("a", second))}
                yield f"{first} {second}", build(header, 4)
    judge(tmp_path, files())


def test_shapes_that_cannot_be(tmp_path):
    shapes = ["[-1]", "[1.0]", "[1e0]", '["1"]', "[null]", "[true]", "[[1]]", "{}", "1", "null",
              '"1"', "[01]", "[+1]", "[1,]", "[,1]", "[0x1]", "[1 1]", "[18446744073709551616]",
              "[4294967296,4294967296]", "[9223372036854775807,2]", "[4611686018427387904,3,0]",
              "[9223372036854775807,3,0]"]
    text = '{"a":{"dtype":"U8","shape":%s,"data_offsets":[0,1]}}'
    judge(tmp_path, [(shape, build(text % shape, 1)) for shape in shapes], refused=True)


def test_shapes_of_nothing_that_are_large(tmp_path):
    shapes = ["[0]", "[0,9223372036854775807]", "[9223372036854775807,0]",
              "[0,9223372036854775807,9223372036854775807]", "[9223372036854775807,2,0]",
              "[4294967296,4294967295,0]"]
    judge(tmp_path, [(shape, build('{"a":{"dtype":"%s","shape":%s,"data_offsets":[0,0]}}'
                                   % (dtype, shape)))
                     for shape in shapes for dtype in BITS], refused=False)


def test_offsets_that_cannot_be(tmp_path):
    offsets = ["[]", "[0]", "[1]", "[0,1,1]", "[0,1.0]", '["0","1"]', "[null,1]", "[0,null]", "1",
               "{}", "null", "[-1,0]", "[0,-1]", "[1,0]", "[1,2]", "[0,9223372036854775807]",
               "[9223372036854775807,9223372036854775807]",
               "[9223372036854775806,9223372036854775807]", "[[0,1]]"]
    judge(tmp_path, [(text, build('{"a":{"dtype":"U8","shape":[1],"data_offsets":%s}}' % text, 1))
                     for text in offsets], refused=True)


def test_what_is_no_header(tmp_path):
    texts = ["", " ", "[]", "1", "null", '"a"', "{", "}", "{}}", "{}x", "{} {}", '{"a"}', '{"a":}',
             '{"a":1}', '{"a":null}', '{"a":"F32"}', '{"a":true}', "{'a':1}", "{a:1}",
             '{"a":%s,}' % ONE, '{,"a":%s}' % ONE, '{"a":%s "b":%s}' % (ONE, ONE), '{"a" %s}' % ONE,
             "{/**/}", "{}//", "{}\f", "{}\v", "{}\0", "\0{}", "{\0}", "\ufeff{}",
             '{"a\tb":%s}' % ONE, '{"a\nb":%s}' % ONE, '{"\\x":%s}' % ONE, '{"\\u12":%s}' % ONE,
             '{"\\ud800":%s}' % ONE, '{"\\udc00":%s}' % ONE, '{"\\ud800\\u0041":%s}' % ONE,
             '{"\\ud800\\ud800":%s}' % ONE, '{"\\udc00\\udc00":%s}' % ONE, '{"\\ud8":%s}' % ONE,
             '{"a":NaN}', '{"a":{"x":NaN}}', '{"a":%s' % ONE, '{"a":%s]' % ONE,
             '{"__metadata__":[]}', '{"__metadata__":1}', '{"__metadata__":"a"}',
             '{"__metadata__":{"a":1}}', '{"__metadata__":{"a":null}}',
             '{"__metadata__":{"a":["b"]}}', '{"__metadata__":{"a":{}}}',
             '{"__metadata__":{"a":true}}', '{"__metadata__":%s}' % ONE]
    judge(tmp_path, [(text, build(text, 1 if "offsets" in text else 0)) for text in texts],
          refused=True)


def test_bad_utf_8(tmp_path):
    parts = [b"\xff", b"\x80", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xed\xa0\x80",
             b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xe2\x82",
             b"\xc3", b"\xc3("]
    one = ONE.encode()
    files = [(repr(part), build(b'{"a' + part + b'":' + one + b"}", 1)) for part in parts]
    files += [(repr(part), build(b'{"__metadata__":{"a":"' + part + b'"}}')) for part in parts]
    files += [(repr(part), build(b'{"a":' + one + b"}" + part, 1)) for part in parts]
    judge(tmp_path, files, refused=True)


def test_good_utf_8(tmp_path):
    texts = ["\x7f", "\u0080", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff", "\ufdd0",
             "\U00010000", "\U0010ffff", "\u202e"]
    files = [(repr(text), build('{"%s":%s}' % (text, ONE), 1)) for text in texts]
    files += [(repr(text), build('{"__metadata__":{"%s":"%s"}}' % (text, text))) for text in texts]
    judge(tmp_path, files, refused=False)


def test_nesting(tmp_path):
    text = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":%s}}'
    judge(tmp_path, [(str(depth), build(text % (opening * depth + inner + closing * depth), 1))
                     for depth in range(118, 132)
                     for opening, inner, closing in (("[", "", "]"), ('{"y":', "1", "}"))]
          + [(str(depth), build(text % ("[" * depth + "]" * depth), 1))
             for depth in (2046, 2047, 2048, 2049, 10000)])


def test_random_headers_are_taken(tmp_path):
    rng = random.Random(1)

    def files() -> Iterator[tuple[str, bytes]]:
        for number in range(400):
            header, size = random_header(rng)
            text = json.dumps(header, ensure_ascii=rng.random() < 0.5,
                              indent=rng.choice((None, None, 1)))
            yield str(number), build(text + " " * rng.randrange(9), size)
    judge(tmp_path, files(), refused=False)


def test_random_headers_with_a_spoiled_field(tmp_path):
    rng = random.Random(2)

    def files() -> Iterator[tuple[str, bytes]]:
        for number in range(800):
            header, size = random_header(rng)
            spoil_field(rng, header)
            yield str(number), build(header, size)
    judge(tmp_path, files())


def test_random_headers_with_spoiled_bytes(tmp_path):
    rng = random.Random(3)

    def files() -> Iterator[tuple[str, bytes]]:
        for number in range(2000):
            header, size = random_header(rng)
            text = spoil_bytes(rng, json.dumps(header, ensure_ascii=False).encode())
            yield str(number), build(text, size + rng.choice((0, 0, 0, 1)))
    judge(tmp_path, files())


def test_files_that_the_package_wrote(tmp_path):
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save
    rng = numpy.random.default_rng(4)
    kinds = ["bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32",
             "float64", "int64", "uint64", "complex64"]

    def files() -> Iterator[tuple[str, bytes]]:
        for number in range(60):
            shapes = [rng.integers(0, 5, i % 4) for i in range(number % 13)]
            tensors = {f"layer.{i}": rng.integers(0, 2, shape).astype(rng.choice(kinds))
                       for i, shape in enumerate(shapes)}
            yield str(number), save(tensors, {"n": str(number)} if number % 2 else None)
    judge(tmp_path, files(), refused=False)


def test_what_is_odd_is_taken_as_well(tmp_path):
    judge(tmp_path, [
        ("space first", build(' \n{"a":%s}' % ONE, 1)),
        ("twice", build('{"a":%s,"a":%s}' % (ONE, ONE), 1)),
        ("twice, and the first of another size", build('{"a":["F32",[9],[7,3]],"a":%s}' % ONE, 1)),
        ("twice, spelled differently", build('{"a":["F32",[9],[7,3]],"\\u0061":%s}' % ONE, 1)),
        ("twice in metadata", build('{"__metadata__":{"a":"b","a":"c"}}')),
        ("spelled metadata", build('{"\\u005f_metadata__":{"a":"b"}}')),
        ("no metadata", build('{"__metadata__":null}')), ("empty", build('{"__metadata__":{}}')),
        ("list", build('{"a":["U8",[1],[0,1]]}', 1)),
        ("dtype object", build('{"a":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}', 1)),
        ("NUL", build('{"a\\u0000":%s}' % ONE, 1)),
        ("NUL or not", build('{"a\\u0000":["U8",[0],[0,0]],"a":["U8",[0],[0,0]]}')),
        ("NUL in metadata", build('{"__metadata__":{"a\\u0000b":"\\u0000","a":"c"}}')),
        ("64 bits", build('{"a":{"dtype":"U8","shape":[18446744073709551615,0],'
                          '"data_offsets":[0,0]}}')),
    ] + [(number, build('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":%s}}' % number, 1))
         for number in GOOD_NUMBERS], refused=False)


def test_what_is_odd_is_refused_as_well(tmp_path):
    judge(tmp_path, [
        ("metadata twice", build('{"__metadata__":null,"__metadata__":{}}')),
        ("a field twice", build('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],'
                                '"dtype":"U8"}}', 1)),
        ("twice, and the first of no kind", build('{"a":["U9",[1],[0,1]],"a":%s}' % ONE, 1)),
        ("short list", build('{"a":["U8",[1]]}', 1)),
        ("long list", build('{"a":["U8",[1],[0,1],0]}', 1)),
        ("dtype object", build('{"a":[{"U8":{}},[1],[0,1]]}', 1)),
        ("two of them", build('{"a":[{"U8":null,"U8":null},[1],[0,1]]}', 1)),
        ("-0", build('{"a":["U8",[-0],[0,0]]}')),
        ("65 bits", build('{"a":["U8",[18446744073709551616,0],[0,0]]}')),
    ] + [(number, build('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":%s}}' % number, 1))
         for number in BAD_NUMBERS]
      + [(repr(word), build(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":%s}}' % word,
                            1))
         for word in (b"1\0", b"true\0", b"null\0", b"\0", b'"\0"', b"tru", b"nulll", b"True")],
        refused=True)


def test_random_spellings(tmp_path):
    """Any number of random headers, each from a seed of its own, most of them spelled oddly."""
    judge(tmp_path, (odd_file(seed) for seed in range(int(os.environ.get("PENSTOCK_PEER_CASES",
                                                                         "4000")))))
