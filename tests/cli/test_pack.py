# SPDX-License-Identifier: MIT
"""penstock pack and unpack: models coded without loss, and given back to the byte."""
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time

import pytest

from cli_program import MIB, PROGRAM
from coded_decoder import KINDS, decode, header_of
from coded_encoder import encode

VALUES = 3 * 16384 + 777
BITS = {"BF16": 16, "F32": 32, "F16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8, "I32": 32, "U8": 8, "F64": 64, "BOOL": 8, "F4": 4}


def weights(dtype, count, seed=0):
    """Numbers with few exponents, as trained ones are."""
    width, mantissa, symbol_bits, _ = KINDS[dtype]
    chance, middle = random.Random(seed), (1 << symbol_bits) * 2 // 3
    out = bytearray()
    for _ in range(count):
        bits = chance.getrandbits(32)
        exponent = max(middle - (32 - bits.bit_length()), 0)
        rest = chance.getrandbits(mantissa + 1)
        value = (rest >> mantissa) << mantissa + symbol_bits | exponent << mantissa
        out += (value | rest & (1 << mantissa) - 1).to_bytes(width, "little")
    return bytes(out)


def noise(size, seed=0):
    return random.Random(seed).randbytes(size)


def file_of(tensors, metadata=None, pad=0):
    """A safetensors file of {name: (dtype, shape, bytes)}."""
    header = {} if metadata is None else {"__metadata__": metadata}
    at, data = 0, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
        data += content
    text = json.dumps(header).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + data


def flat(dtype, content):
    return dtype, [len(content) * 8 // BITS[dtype]], content


def small_model():
    """Something of everything: each kind, what is never coded, what is empty or tiny."""
    tensors = {f"weights {dtype}": flat(dtype, weights(dtype, VALUES)) for dtype in KINDS}
    tensors["odd"] = flat("BOOL", bytes(i % 2 for i in range(13)))
    tensors["bf16 of noise"] = flat("BF16", noise(VALUES * 2, 1))
    tensors["ints"] = flat("I32", noise(4000, 2))
    tensors["u8 \u00e9\u0000"] = flat("U8", noise(33, 3))
    tensors["nothing"] = "F32", [0, 5], b""
    tensors["tiny"] = flat("BF16", weights("BF16", 100))
    tensors["matrix"] = "F32", [128, 64], weights("F32", 128 * 64)
    return tensors


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "model.safetensors"
    path.write_bytes(file_of(small_model(), {"format": "pt", "penstock.own": "kept"}, pad=3))
    return path


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file()}


# -------------------------------------------------------------------------------- round trips --

def test_a_file_comes_back_to_the_byte(penstock, original, tmp_path):
    packed, back = tmp_path / "packed.safetensors", tmp_path / "back.safetensors"
    report = penstock.ok("pack", original, packed, "--verify", "--json").json
    assert report["verified"] and report["coded_files"] == report["files"] == 1
    assert report["bytes"] == original.stat().st_size
    assert report["stored"] == packed.stat().st_size < report["bytes"]
    again = penstock.ok("unpack", packed, back, "--json").json
    assert (again["bytes"], again["stored"]) == (report["bytes"], report["stored"])
    assert sha(back) == sha(original)


def test_the_page_is_enough_to_write_a_decoder(penstock, original, tmp_path):
    packed = tmp_path / "packed.safetensors"
    penstock.ok("pack", original, packed, "-q")
    assert decode(packed.read_bytes()) == original.read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_files_of_another_writer_are_read(penstock, tmp_path, seed):
    original, theirs = tmp_path / "model.safetensors", tmp_path / "theirs.safetensors"
    tensors = {f"weights {dtype}": flat(dtype, weights(dtype, 16384 + 5 + seed, seed))
               for dtype in KINDS}
    tensors |= {"noise": flat("BF16", noise(40000, seed)), "few": flat("F16", weights("F16", 3)),
                "ints": flat("I32", noise(444)), "none": ("F32", [0], b"")}
    original.write_bytes(file_of(tensors, {"format": "pt"}))
    theirs.write_bytes(encode(original.read_bytes(), seed))
    assert decode(theirs.read_bytes()) == original.read_bytes()
    penstock.ok("verify", theirs)
    penstock.ok("load", theirs, "-d", "host", "-q")
    penstock.ok("unpack", theirs, tmp_path / "back", "-q")
    assert sha(tmp_path / "back") == sha(original)


def test_threads_and_memory_leave_no_trace_in_the_result(penstock, tmp_path):
    original, found = tmp_path / "model.safetensors", set()
    original.write_bytes(file_of({"w": flat("BF16", weights("BF16", 1 << 16) * 30)}))
    for options in (["--threads", "1"], ["--threads", "7"], ["--memory-limit", "4M"]):
        penstock.ok("pack", original, tmp_path / "packed", "-q", *options)
        found.add(sha(tmp_path / "packed"))
    assert len(found) == 1


SPECIAL = {
    "zeros": bytes(4 * VALUES),
    "negative zeros": b"\x00\x80" * (2 * VALUES),
    "infinities": b"\x80\x7f\x80\xff" * VALUES,
    "NaNs with payloads": b"".join(struct.pack("<I", 0x7f800001 + i * 127) for i in range(VALUES)),
    "subnormals": b"".join(struct.pack("<H", i % 128) for i in range(2 * VALUES)),
    "every value of 16 bits": b"".join(struct.pack("<H", i) for i in range(1 << 16)),
    "noise": noise(4 * VALUES, 5),
    "text": b"All work and no play makes Jack a dull boy. " * 5000,
}


@pytest.mark.parametrize("content", SPECIAL.values(), ids=SPECIAL)
def test_all_bit_patterns_survive(penstock, tmp_path, content):
    content = content[:len(content) // 4 * 4]
    original = tmp_path / "model.safetensors"
    # The last one gets smaller in any case, so that the file does.
    original.write_bytes(file_of({dtype: flat(dtype, content) for dtype in KINDS}
                                 | {"weights": flat("BF16", weights("BF16", 32768))}))
    penstock.ok("pack", original, tmp_path / "packed", "-q", "--verify")
    penstock.ok("unpack", tmp_path / "packed", tmp_path / "back", "-q")
    assert sha(tmp_path / "back") == sha(original)
    for entry in penstock.ok("inspect", tmp_path / "packed", "--json").json["tensors"]:
        assert entry["stored_bytes"] <= entry["bytes"] + 16


@pytest.mark.parametrize("content", SPECIAL.values(), ids=SPECIAL)
def test_the_other_decoder_finds_all_bit_patterns(penstock, tmp_path, content):
    original = tmp_path / "model.safetensors"
    original.write_bytes(file_of({dtype: flat(dtype, content[:20000]) for dtype in KINDS}
                                 | {"weights": flat("BF16", weights("BF16", 32768))}))
    penstock.ok("pack", original, tmp_path / "packed", "-q")
    assert decode((tmp_path / "packed").read_bytes()) == original.read_bytes()


@pytest.mark.parametrize("tensors", [
    {}, {"empty": ("BF16", [0], b"")}, {"scalar": ("F32", [], b"\0\0\x80\x3f")},
    {"noise": flat("BF16", noise(200000))}, {"ints": flat("I32", noise(100000))},
], ids=["no tensors", "an empty one", "a scalar", "noise", "integers"])
def test_what_would_not_get_smaller_stays_as_it_is(penstock, tmp_path, tensors):
    original = tmp_path / "model.safetensors"
    original.write_bytes(file_of(tensors))
    report = penstock.ok("pack", original, tmp_path / "packed", "--verify", "--json").json
    assert sha(tmp_path / "packed") == sha(original)
    assert report["coded_files"] == 0 and report["stored"] == report["bytes"]


def test_weights_are_stored_in_two_thirds(penstock, tmp_path):
    penstock.ok("make-model", "layers=2,hidden=512", tmp_path / "m", "-q")
    report = penstock.ok("pack", tmp_path / "m", tmp_path / "p", "--json").json
    assert 0.64 < report["ratio"] <= 0.675
    kind, = report["dtypes"]
    assert kind["dtype"] == "BF16" and kind["stored"] < 0.675 * kind["bytes"]


# ------------------------------------------------------------------------------------- folders --

@pytest.fixture
def folder(penstock, tmp_path):
    penstock.ok("make-model", "layers=2,hidden=256,shards=2", tmp_path / "model", "-q")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "unet").mkdir()
    (tmp_path / "model" / "unet" / "part.safetensors").write_bytes(
        file_of({"w": flat("F16", weights("F16", 20000))}))
    (tmp_path / "model" / ".hidden").write_text("not the model's")
    return tmp_path / "model"


def test_a_folder_comes_back_with_everything_in_it(penstock, folder, tmp_path):
    report = penstock.ok("pack", folder, tmp_path / "packed/", "--json").json
    assert report["files"] == report["coded_files"] == 3 and report["copied_files"] == 3
    packed, before = tree(tmp_path / "packed"), tree(folder)
    del before[".hidden"]
    assert packed.keys() == before.keys()
    for name, content in packed.items():
        assert (content == before[name]) == (not name.endswith(".safetensors")), name
    (tmp_path / "back").mkdir()
    penstock.ok("unpack", tmp_path / "packed", tmp_path / "back")
    assert tree(tmp_path / "back") == before


def test_links_are_followed_as_in_the_cache_of_the_hub(penstock, folder, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.glob("*.*"):
        (snapshot / path.name).symlink_to(path)
    penstock.ok("pack", snapshot, tmp_path / "packed", "-q")
    assert not any(path.is_symlink() for path in (tmp_path / "packed").iterdir())


def test_a_packed_model_is_listed_as_it_was_with_both_sizes(penstock, original, tmp_path):
    packed = tmp_path / "packed.safetensors"
    penstock.ok("pack", original, packed, "-q")
    before = penstock.ok("inspect", original, "--json").json
    after = penstock.ok("inspect", packed, "--json").json

    def facts(report):
        return {entry["name"]: (entry["dtype"], entry["shape"], entry["bytes"])
                for entry in report["tensors"]}
    assert facts(after) == facts(before)
    coding = {entry["name"]: entry["coding"] for entry in after["tensors"]}
    assert coding["weights BF16"] == "planes" and coding["ints"] == coding["tiny"] == "none"
    stored = sum(entry["stored_bytes"] for entry in after["tensors"])
    assert stored == after["total"]["stored_bytes"] < after["total"]["bytes"]
    file, = after["files"]
    assert file["original_bytes"] == original.stat().st_size
    assert file["metadata"] == before["files"][0]["metadata"]
    text = penstock.ok("inspect", packed).out
    assert "packed from" in text and " coded" in text


def test_a_packed_model_is_loaded_to_the_host(penstock, folder, tmp_path):
    penstock.ok("pack", folder, tmp_path / "packed", "-q")
    plain = penstock.ok("load", folder, "-d", "host", "--json").json
    packed = penstock.ok("load", tmp_path / "packed", "-d", "host", "--json").json
    assert packed["tensors"] == plain["tensors"] and packed["bytes"] < 0.7 * plain["bytes"]


def test_a_packed_model_is_loaded_to_a_gpu_which_decodes_it(penstock, gpu, folder, tmp_path):
    penstock.ok("pack", folder, tmp_path / "packed", "-q")
    fake = gpu()
    plain = fake.ok("load", folder, "-d", "cuda:0", "--json", "--hash").json
    packed = fake.ok("load", tmp_path / "packed", "-d", "cuda:0", "--json", "--hash").json
    hashes = [{entry["name"]: entry["hash"] for entry in each["hashes"]}
              for each in (plain, packed)]
    assert hashes[0] == hashes[1] and len(hashes[0]) == plain["tensors"]
    assert 0 < packed["coded_bytes"] <= packed["bytes"] < packed["delivered_bytes"]
    assert packed["delivered_bytes"] == plain["delivered_bytes"] == plain["bytes"]
    assert packed["decode_seconds"] == packed["device_staging_bytes"] == plain["coded_bytes"] == 0
    text = fake.ok("load", tmp_path / "packed", "-d", "cuda:0").out
    assert "were coded" in text and "by the GPU" in text
    assert "by cores" in penstock.ok("load", tmp_path / "packed", "-d", "host").out


# ------------------------------------------------------------------------------------- refused --

def refused(penstock, *args):
    result = penstock(*args, "--json")
    assert result.status == 1
    return result.error["message"]


def test_what_is_packed_is_not_packed_again(penstock, original, tmp_path):
    penstock.ok("pack", original, tmp_path / "packed", "-q")
    assert "packed already" in refused(penstock, "pack", tmp_path / "packed", tmp_path / "twice")
    assert "not packed" in refused(penstock, "unpack", original, tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == ["packed"]


def test_a_folder_that_has_something_is_left_alone(penstock, folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "not empty" in refused(penstock, "pack", folder, tmp_path / "out")
    assert "lies in the folder" in refused(penstock, "pack", folder, folder / "out")
    assert "no folder" in refused(penstock, "pack", folder, tmp_path / "out" / "mine")
    assert tree(tmp_path / "out") == {"mine": b"mine"} and not (folder / "out").exists()


def test_a_file_is_not_packed_onto_itself_or_a_folder(penstock, original, tmp_path):
    assert "is the file that is read" in refused(penstock, "pack", original, original)
    assert "is a folder" in refused(penstock, "pack", original, tmp_path)
    (tmp_path / "none").mkdir()
    assert "no *.safetensors" in refused(penstock, "pack", tmp_path / "none", tmp_path / "x")


def with_header(data, change):
    """A coded file with another header."""
    header, _, begin = header_of(data)
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", begin - 8) + text.ljust(begin - 8) + data[begin:]


def metadata(key, value):
    return lambda header: header["__metadata__"].update({key: value})


def other_names(header):
    header["renamed"] = header.pop("matrix")


def other_shape(header):
    header["tiny"]["shape"] = [50, 2]


def other_dtype(header):
    header["tiny"]["dtype"] = "F16"


BAD_HEADERS = {
    "another version": (metadata("penstock.coded", "2"), "version \"2\""),
    "no original header": (lambda h: h["__metadata__"].pop("penstock.header"), "not all of how"),
    "an original header that is none": (metadata("penstock.header", "{"), "header"),
    "another size": (metadata("penstock.bytes", "100000"), "file"),
    "no size": (metadata("penstock.bytes", "many"), "not the size"),
    "another CRC32": (metadata("penstock.crc32", "00000000"), "CRC32"),
    "a size and more": (metadata("penstock.bytes", "201312\0junk"), "not the size"),
    "no CRC32": (metadata("penstock.crc32", "0"), "hex digits"),
    "a CRC32 with a sign": (metadata("penstock.crc32", "-1234567"), "hex digits"),
    "a CRC32 with a prefix": (metadata("penstock.crc32", "0x123456"), "hex digits"),
    "other names": (other_names, "the original header"),
    "another shape": (other_shape, "neither coded nor"),
    "another dtype": (other_dtype, "neither coded nor"),
}


@pytest.mark.parametrize("change, words", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_header_that_contradicts_itself_is_refused(penstock, original, tmp_path, change, words):
    packed = tmp_path / "packed"
    penstock.ok("pack", original, packed, "-q")
    packed.write_bytes(with_header(packed.read_bytes(), change))
    assert words in refused(penstock, "unpack", packed, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("dtype", KINDS)
def test_a_chunk_that_grew_is_refused(penstock, tmp_path, dtype):
    """It would be longer than the memory that its values have."""
    path = tmp_path / "grew"
    path.write_bytes(encode(file_of({"w": flat(dtype, weights(dtype, 17000))}), wasteful=True))
    for command in (["verify", path], ["load", path, "-d", "host"]):
        assert "contradicts itself" in refused(penstock, *command)


def test_a_tensor_that_is_coded_in_no_bytes_is_refused(penstock, tmp_path):
    """It would be taken for one that is not coded, and get its neighbour's."""
    data = encode(file_of({"a": ("BF16", [8], bytes(16)), "s": ("U8", [64], b"secret.." * 8)}))
    header, _, begin = header_of(data)
    low, high = header["a"]["data_offsets"]
    header["a"] = {"dtype": "U8", "shape": [0], "data_offsets": [low, low]}
    for name in header.keys() - {"__metadata__", "a"}:
        header[name]["data_offsets"] = [at - (high - low) * (at >= high)
                                        for at in header[name]["data_offsets"]]
    path = tmp_path / "none"
    path.write_bytes(with_header(data[:begin + low] + data[begin + high:],
                                 lambda found: found.update(header)))
    for command in (["verify", path], ["load", path, "-d", "host"]):
        assert "has no bytes" in refused(penstock, *command)


def test_a_damaged_chunk_is_named(penstock, original, tmp_path):
    packed, bad = tmp_path / "packed", tmp_path / "bad"
    penstock.ok("pack", original, packed, "-q")
    data = bytearray(packed.read_bytes())
    header, _, begin = header_of(data)
    # It is the first tensor, and its chunks are the first ones; each has its rest at 16.
    sizes = [struct.unpack_from("<I", data, begin + 16 * i + 12)[0] for i in range(2)]
    data[begin + header["weights BF16"]["data_offsets"][0] + sum(sizes) + 5000] ^= 16
    bad.write_bytes(data)
    words = refused(penstock, "unpack", bad, tmp_path / "back")
    assert 'chunk 2 of tensor "weights BF16"' in words and "checksum" in words
    assert not (tmp_path / "back").exists()


def test_explain_says_that_a_load_decodes(penstock, folder, original, tmp_path):
    penstock.ok("pack", folder, tmp_path / "packed", "-q")
    penstock.ok("pack", original, tmp_path / "one", "-q")
    for path, coded in ((original, False), (tmp_path / "one", True), (folder, False),
                        (tmp_path / "packed", True)):
        plan = penstock.ok("explain", path, "-d", "host", "--json").json
        assert any(file["coded"] for file in plan.get("files", [plan])) == coded
        assert ("a load decodes it" in penstock.ok("explain", path, "-d", "host").out) == coded


def test_verify_decodes_what_is_packed(penstock, folder, tmp_path):
    penstock.ok("pack", folder, tmp_path / "packed", "-q")
    report = penstock.ok("verify", tmp_path / "packed", "--json").json
    shards = sorted(folder.glob("*.safetensors"))
    assert report["verified_bytes"] == sum(path.stat().st_size for path in shards)
    assert report["verified_by"] == "checksums" and report["unverified_bytes"] == 0
    assert "as they were packed" in penstock.ok("verify", tmp_path / "packed").out
    plain = penstock.ok("verify", folder, "--json").json
    assert plain["verified_by"] == "nothing" and plain["verified_bytes"] == 0
    # A model may be packed in part.
    (tmp_path / "packed" / shards[0].name).write_bytes(shards[0].read_bytes())
    report = penstock.ok("verify", tmp_path / "packed", "--json").json
    assert report["unverified_bytes"] == shards[0].stat().st_size
    assert report["verified_bytes"] == shards[1].stat().st_size


def test_verify_names_file_tensor_and_chunk_of_any_damage(penstock, original, tmp_path):
    packed = tmp_path / "packed.safetensors"
    penstock.ok("pack", original, packed, "-q")
    good = packed.read_bytes()
    header, _, begin = header_of(good)
    for name, words in (("weights F32", 'chunk 0 of tensor "weights F32"'), ("ints", "CRC32")):
        data = bytearray(good)
        data[begin + header[name]["data_offsets"][0] + 100] ^= 1
        packed.write_bytes(data)
        error = penstock("verify", packed, "--json").error
        assert words in error["message"] and error["object"] == str(packed)


def test_a_damaged_table_never_gives_other_bytes(penstock, original, tmp_path):
    packed, bad = tmp_path / "packed", tmp_path / "bad"
    penstock.ok("pack", original, packed, "-q")
    data = packed.read_bytes()
    header, _, begin = header_of(data)
    refusals = 0
    for byte in range(0, header["__penstock__"]["data_offsets"][1], 7):
        wrong = bytearray(data)
        wrong[begin + byte] ^= 1 << byte % 8
        bad.write_bytes(wrong)
        if penstock("unpack", bad, tmp_path / "back", "-q").status == 0:
            # A few escapes more than there are mean nothing.
            assert sha(tmp_path / "back") == sha(original)
            (tmp_path / "back").unlink()
        else:
            refusals += 1
    assert refusals > 50 and not (tmp_path / "back").exists()


# ------------------------------------------------------------------------------------- trouble --

@pytest.fixture
def large(tmp_path):
    """60 MB, so that there is time to interrupt."""
    path = tmp_path / "large"
    path.mkdir()
    content = weights("BF16", 1 << 16) * 240
    for i in range(2):
        (path / f"{i}.safetensors").write_bytes(file_of({f"w{i}": flat("BF16", content)}))
    return path


def left(folder):
    """What is there that does not begin with a point, and whether hidden things hold any byte."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_killed_leaves_nothing(penstock, large, tmp_path, what, number):
    source = large if what == "folder" else large / "0.safetensors"
    before = left(tmp_path)
    for delay in (0.01, 0.03, 0.06):
        process = penstock.start("pack", source, tmp_path / "out", "--threads", "1", "--verify")
        time.sleep(delay)
        process.send_signal(number)
        process.communicate(timeout=30)
        if process.returncode == 0:
            break
        assert left(tmp_path) == before and not (tmp_path / "out").exists()
    penstock.ok("pack", source, tmp_path / "again", "-q")


def test_the_next_run_removes_what_a_kill_left(penstock, folder, tmp_path):
    stale = tmp_path / ".out.penstock-1-0"
    (stale / "unet").mkdir(parents=True)
    (stale / "unet" / "file").write_text("x")
    penstock.ok("pack", folder, tmp_path / "out", "-q")
    assert not stale.exists()


def test_a_full_disk_is_told_and_nothing_is_left(penstock, large, small_fs):
    result = penstock("pack", large / "0.safetensors", small_fs / "out", "--json")
    assert result.status == 1 and "No space" in result.error["message"]
    assert os.listdir(small_fs) == []


def test_memory_stays_within_the_promise(penstock, large, tmp_path):
    script = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    run = subprocess.run([sys.executable, "-c", script, PROGRAM, "pack", large, tmp_path / "out",
                          "-q", "--memory-limit", "8M"], capture_output=True, text=True,
                         stdin=subprocess.DEVNULL, check=True)
    assert int(run.stdout) * 1024 < 48 * MIB
