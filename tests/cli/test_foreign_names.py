# SPDX-License-Identifier: MIT
"""Names that others have chosen: nothing of them commands the terminal, whatever prints them.

A name comes from the command line, from a folder, from an index or from the header of a file. Each
is made of everything that a terminal obeys or hides, and every command meets it, with and without
--json.
"""
import json
import os
import re
import struct

import pytest

from test_options import COMMANDS

# What a terminal obeys or does not show: C0, DEL, C1, direction, no width.
NASTY = ("\x1b[2J\x1b]0;owned\x07\r\n\t\x7f\x9b31m\u202e\u202a\u2066\u2069\u200b\u200f\ufeff"
         "\u2028\U000e0041")
SHOWN = (r"\x1b[2J\x1b]0;owned\x07\x0d\n\t\x7f\u009b31m\u202e\u202a\u2066\u2069\u200b\u200f\ufeff"
         r"\u2028\U000e0041")
# The same as a file name, with bytes that are no UTF-8.
BYTES = NASTY.encode() + b"\x9b2J\xff\xe2\x80"
BYTES_SHOWN = SHOWN + r"\x9b2J\xff\xe2\x80"
HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"
                    "\ufeff\ufffd\U000e0000-\U000e007f]")


def is_harmless(text, lines=None):
    """Nothing hidden; U+FFFD is what the tests make of bytes that are no UTF-8."""
    found = HIDDEN.search(text)
    assert not found, (ascii(found), ascii(text))
    assert lines is None or text.count("\n") == lines, text


def entry(dtype="U8", begin=0):
    return {"dtype": dtype, "shape": [1], "data_offsets": [begin, begin + 1]}


def write(path, header, data=b"\0"):
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    return path


def fails(penstock, *args, status=1):
    """A failure with and without --json: its words, in one line, and the error."""
    plain, result = penstock(*args), penstock(*args, "--json")
    for each in (plain, result):
        assert each.status == status, each.err
        is_harmless(each.err, lines=1)
        is_harmless(each.out)
    assert plain.out == "" and plain.err == result.err
    return result.err, result.error


@pytest.mark.parametrize("command, operand", [
    (["copy"], ["host:"]), (["explain"], []), (["inspect"], []), (["load", "-d", "host"], []),
])
@pytest.mark.parametrize("name, shown", [(NASTY.encode(), SHOWN), (BYTES, BYTES_SHOWN)])
def test_path_that_is_not_there(penstock, tmp_path, command, operand, name, shown):
    path = os.fsencode(tmp_path) + b"/" + name
    words, error = fails(penstock, *command, path, *operand)
    assert shown in words
    # What JSON can hold is the name itself; of the rest, the bytes can be read.
    assert error["object"].endswith(NASTY if shown == SHOWN else BYTES_SHOWN)


def test_files_of_such_names_are_read_and_written(penstock, tmp_path):
    path = os.path.join(os.fsencode(tmp_path), BYTES)
    for args in (["copy", "pattern:1M", path], ["copy", path, "host:"], ["explain", path]):
        is_harmless(penstock.ok(*args).out)
        is_harmless(penstock.ok(*args, "--json").out)
    assert penstock.ok("explain", path).out.startswith(f"{tmp_path}/{BYTES_SHOWN}\n")
    assert penstock.ok("explain", path, "--json").json["file"] == f"{tmp_path}/{BYTES_SHOWN}"
    report = penstock.report("pattern:1M", os.fsencode(tmp_path) + b"/" + NASTY.encode())
    assert report["destination"] == f"{tmp_path}/{NASTY}"
    _, error = fails(penstock, "copy", path, path)
    assert BYTES_SHOWN in error["object"]


def test_model_of_such_names_is_shown(penstock, tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), BYTES)
    os.mkdir(folder)
    write(os.path.join(folder, BYTES + b".safetensors"),
          {"__metadata__": {NASTY: NASTY}, NASTY: entry()})
    for args in (["explain", folder], ["inspect", folder], ["load", "--hash", folder]):
        out = penstock.ok(*args).out
        is_harmless(out)
        assert SHOWN in out
        result = penstock.ok(*args, "--json")
        is_harmless(result.out)
    found = penstock.ok("inspect", folder, "--json").json
    assert found["tensors"][0]["name"] == NASTY
    assert found["files"][0]["metadata"] == {NASTY: NASTY}
    assert found["files"][0]["name"] == BYTES_SHOWN + ".safetensors"
    assert result.json["hashes"][0]["name"] == NASTY
    words, error = fails(penstock, "inspect", folder, "--keys", "nothing")
    assert SHOWN[:30] in words and NASTY[:20] in error["hint"]
    fails(penstock, "load", "-d", "host", folder, "--keys", NASTY + "x")


# What JSON, shells and formats of printf take for their own, and all of the above.
QUOTES = b"\"'`\\\\n${x}%s%n{}[]:,\\u0000 " + BYTES


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("made", ["nothing", "a file", "a folder", "a model"])
def test_every_command_whatever_its_operands_are_called(penstock, tmp_path, command, made):
    """With and without --json, where there is something of that name and where there is not: the
    JSON is one valid object, which Penstock() sees to, and no line does harm."""
    path = os.path.join(os.fsencode(tmp_path), QUOTES)
    if made == "a file":
        open(path, "wb").close()
    elif made != "nothing":
        os.mkdir(path)
    if made == "a model":
        write(os.path.join(path, QUOTES + b".safetensors"),
              {"__metadata__": {NASTY: '"\\'}, '"\'\\' + NASTY: entry()})
    operands = [path] * (2 if command in ("copy", "make-model") else 1)
    if command == "make-model":
        operands[0] = b"layers=1"
    for options in ([], ["--json"]):
        if "--json" in options and command == "completion":
            continue
        result = penstock(command, *operands, *options)
        is_harmless(result.err)
        is_harmless(result.out)
        assert result.status in (0, 1, 2) and (result.out or result.err)
        # One that was made is there, and is in the way of the second.
        assert result.err.count("\n") == (1 if result.status else 0)


def test_repeated_copies_of_such_names(penstock, tmp_path):
    path = os.path.join(os.fsencode(tmp_path), QUOTES)
    penstock.ok("copy", "-q", "pattern:1M", path)
    for args in (["copy", path, "host:", "-n", "2", "--drop-cache"],
                 ["copy", path, path + b"2", "-n", "2", "--verify"]):
        is_harmless(penstock.ok(*args).out)
        is_harmless(penstock.ok(*args, "--json").out)
    fails(penstock, "copy", "null:" + NASTY, "host:", "--drop-cache", status=2)


@pytest.mark.parametrize("header", [
    {NASTY: 1}, {NASTY: entry(dtype=NASTY)}, {"x": entry(dtype=NASTY)}, {NASTY: entry(begin=7)},
    {"__metadata__": {NASTY: 1}},
])
def test_damaged_header(penstock, tmp_path, header):
    path = write(tmp_path / "x.safetensors", header)
    for command in (["inspect"], ["load", "-d", "host"]):
        words, error = fails(penstock, *command, path)
        assert r"\x1b[2J" in words and "\x1b[2J" in error["message"]


@pytest.mark.parametrize("text", ['{"\x1b[2J', '{"%s": 1, "%s": 2}' % (NASTY[:5], NASTY[:5]),
                                  '{"a": \x9b\u202e}', "\x1b[2J" + NASTY])
def test_header_and_index_that_are_no_json(penstock, tmp_path, text):
    raw = text.encode("utf-8", "surrogatepass") + b"\xff"
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    (tmp_path / "model.safetensors.index.json").write_bytes(raw)
    (tmp_path / "spec.json").write_bytes(raw)
    fails(penstock, "inspect", tmp_path / "x.safetensors")
    fails(penstock, "load", "-d", "host", tmp_path)
    fails(penstock, "make-model", tmp_path / "spec.json", tmp_path / "out", status=2)


@pytest.mark.parametrize("index, files", [
    ({NASTY: "x.safetensors"}, {"x.safetensors": {"x": entry()}}),
    ({NASTY: 1}, {}),
    ({NASTY: "/" + NASTY}, {}),
    ({NASTY: "../" + NASTY}, {}),
    ({NASTY: NASTY + ".safetensors"}, {}),
    ({NASTY: NASTY + ".safetensors"}, {NASTY + ".safetensors": {"x": entry()}}),
    ({NASTY: "a.safetensors", "b": "b.safetensors"},
     {"a.safetensors": {"a": entry()}, "b.safetensors": {NASTY: entry(), "b": entry(begin=1)}}),
])
def test_hostile_index(penstock, tmp_path, index, files):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name, header in files.items():
        write(tmp_path / name, header, bytes(len(header)))
    for command in (["inspect"], ["load", "-d", "host"]):
        words, _ = fails(penstock, *command, tmp_path)
        assert r"\x1b[2J" in words


def test_warnings(penstock, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": NASTY + ".safetensors"}}))
    write(tmp_path / (NASTY + ".safetensors"), {"x": entry(), NASTY: entry(begin=1)}, bytes(2))
    for command in (["inspect"], ["load", "-d", "host"]):
        out = penstock.ok(*command, tmp_path).out
        is_harmless(out)
        assert re.search(r"^  warning: .*\\x1b\[2J", out, re.M)
        result = penstock.ok(*command, tmp_path, "--json")
        is_harmless(result.out)
        assert NASTY in result.json["warnings"][0]


def test_twice_in_a_folder_without_an_index(penstock, tmp_path):
    for name in ("a", NASTY):
        write(tmp_path / (name + ".safetensors"), {NASTY: entry()})
    fails(penstock, "inspect", tmp_path)


def test_make_model(penstock, tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), BYTES)
    out = penstock.ok("make-model", "layers=1", folder).out
    is_harmless(out)
    assert BYTES_SHOWN in out
    fails(penstock, "make-model", "layers=1", folder)
    write(os.path.join(folder, BYTES + b".safetensors"), {})
    words, _ = fails(penstock, "make-model", "layers=1", folder, "--force")
    assert SHOWN[:20] in words
    for model in (NASTY, f"layers={NASTY}", f"{NASTY}=1"):
        fails(penstock, "make-model", model, tmp_path / "new", status=2)
    spec = tmp_path / "spec.json"
    name = NASTY + ".safetensors"
    for content in ({NASTY: 1}, {"files": [{"name": NASTY}]}, {"files": [], "metadata": {NASTY: 1}},
                    {"files": [{"name": name, "tensors": [{"name": NASTY, "dtype": NASTY}]}]},
                    {"files": [{"name": name, "tensors": [{"name": NASTY, "dtype": "U8"}]}]},
                    {"files": [{"name": name, NASTY: 1}]}):
        spec.write_text(json.dumps(content))
        fails(penstock, "make-model", spec, tmp_path / "new", status=2)


@pytest.mark.parametrize("args", [
    [NASTY], ["copy", f"--{NASTY}", "a", "b"], ["copy", f"-{NASTY}", "a", "b"],
    ["copy", "--size", NASTY, "a", "b"], ["copy", "--lanes", NASTY, "a", "b"],
    ["copy", "--cache", NASTY, "a", "b"], ["copy", "--transfer", NASTY, "a", "b"],
    ["copy", "--inject", NASTY, "a", "b"], ["load", "--device", NASTY, "a"],
    ["copy", "a", "b", f"--json={NASTY}"], ["make-model", "--seed", NASTY, "a", "b"],
    ["copy", "--repeat", NASTY, "a", "b"], ["explain", "-d", NASTY, "a"], ["completion", NASTY],
    ["inspect", f"--{NASTY}", "a"], ["help", NASTY],
])
def test_misuse(penstock, args):
    result = penstock(*args)
    assert result.status == 2
    is_harmless(result.err, lines=1)
    is_harmless(result.out)


def test_interruption(penstock, tmp_path):
    import signal
    import time
    process = penstock.start("copy", "pattern:2G,rate=200M", tmp_path / NASTY)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    result = penstock.finish(process, [])
    assert result.status == 130
    is_harmless(result.err, lines=1)
    assert SHOWN in result.err
