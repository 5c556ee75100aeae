# SPDX-License-Identifier: MIT
"""penstock inspect: the same tensors as the safetensors package sees, and what is wrong."""
import json
import os
import re
import struct

import pytest

from test_bad_input import as_nobody
from test_options import documented_members, members

SMALL = "layers=2,hidden=32,intermediate=48,heads=4,kv=2,vocab=100"


@pytest.fixture
def model(penstock, tmp_path):
    """Makes a small model of so many shards and gives its folder."""
    def make(shards=1):
        folder = tmp_path / f"model-{shards}"
        penstock.ok("make-model", f"{SMALL},shards={shards}", folder, "-q")
        return folder
    return make


def inspect(penstock, *args):
    return penstock.ok("inspect", *args, "--json").json


def write(path, header, data=b"", length=None):
    """A safetensors file as bytes, good or bad."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def seen_by_the_package(path):
    """Name, dtype, shape, bytes and place of each tensor, by the safetensors package."""
    from safetensors import safe_open
    from safetensors.torch import _SIZE
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    with safe_open(path, "pt") as file:
        for name in file.keys():
            part, tensor = file.get_slice(name), file.get_tensor(name)
            begin, end = header[name]["data_offsets"]
            assert tensor.numel() * _SIZE[tensor.dtype] == end - begin
            yield {"name": name, "dtype": part.get_dtype(), "shape": part.get_shape(),
                   "bytes": end - begin, "file": path.name, "offset": start + begin}


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_those_that_the_package_sees(penstock, model, shards):
    folder = model(shards)
    found = inspect(penstock, folder)
    expected = [entry for path in sorted(folder.glob("*.safetensors"))
                for entry in seen_by_the_package(path)]
    for entry in found["tensors"]:
        power = entry.pop("alignment")
        assert entry.pop("coding") == "none" and entry.pop("stored_bytes") == entry["bytes"]
        assert entry["offset"] % power == 0 and power & (power - 1) == 0
        assert power == 4096 or entry["offset"] % (2 * power)
    key = lambda entry: (entry["file"], entry["offset"], entry["name"])
    assert found["tensors"] == sorted(expected, key=key)
    assert [file["name"] for file in found["files"]] == \
        [path.name for path in sorted(folder.glob("*.safetensors"))]
    for file in found["files"]:
        assert file["path"] == str(folder / file["name"])
        assert file["bytes"] == (folder / file["name"]).stat().st_size
        assert file["metadata"] == {"format": "pt"}
    total = sum(entry["bytes"] for entry in expected)
    assert found["total"] == {
        "tensors": len(expected), "bytes": total, "stored_bytes": total, "dtypes": [
            {"dtype": "BF16", "tensors": len(expected), "bytes": total, "stored_bytes": total}]}
    assert found["warnings"] == [] and found["model"] == str(folder)


def test_a_long_shape_is_shown_whole(penstock, tmp_path):
    shape = [1] * 300 + [7]
    file = write(tmp_path / "long.safetensors",
                 {"t": {"dtype": "U8", "shape": shape, "data_offsets": [0, 7]}}, bytes(7))
    assert f"[{','.join(map(str, shape))}]" in penstock.ok("inspect", file).out


def test_file_folder_and_index_are_the_same_model(penstock, model):
    one, many = model(1), model(3)
    assert inspect(penstock, one)["tensors"] == \
        inspect(penstock, one / "model.safetensors")["tensors"]
    assert inspect(penstock, many)["tensors"] == \
        inspect(penstock, many / "model.safetensors.index.json")["tensors"]
    (many / "model.safetensors.index.json").unlink()
    assert len(inspect(penstock, many)["tensors"]) == len(inspect(penstock, one)["tensors"])


def test_every_dtype_has_its_name_and_sum(penstock, tmp_path):
    kinds = ["BOOL", "F4", "F6_E2M3", "U8", "F8_E5M2", "F8_E8M0", "I16", "F16", "F32", "C64", "U64"]
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"files": [{"name": "x.safetensors", "tensors": [
        {"name": f"{kind}{i}", "dtype": kind, "shape": [8 * i]} for kind in kinds
        for i in (1, 2)]}]}))
    penstock.ok("make-model", spec, tmp_path / "out", "-q")
    total = inspect(penstock, tmp_path / "out")["total"]
    counts = {entry["dtype"]: entry["tensors"] for entry in total["dtypes"]}
    assert counts == dict.fromkeys(kinds, 2)
    bits = {"F4": 4, "F6_E2M3": 6, "I16": 16, "F16": 16, "F32": 32, "C64": 64, "U64": 64}
    for entry in total["dtypes"]:
        assert entry["bytes"] == 24 * bits.get(entry["dtype"], 8) // 8
    assert total["bytes"] == sum(entry["bytes"] for entry in total["dtypes"])


def test_people_get_columns(penstock, model):
    folder = model(2)
    out = penstock.ok("inspect", folder).out
    lines = out.splitlines()
    assert lines[0] == str(folder)
    assert re.search(r"^  file 2  model-00002-of-00002.safetensors  [\d.]+ kB \(\d+ bytes, "
                     r"\d+ of it header\)$", out, re.M)
    assert "          format: pt" in lines
    row = re.search(r"^  model\.norm\.weight +BF16 +\[32\] +64 +2 +\d+ +\d+$", out, re.M)
    head = next(line for line in lines if line.split()[:2] == ["name", "dtype"])
    assert row and head.index("dtype") == row.group().index("BF16")
    assert re.search(r"^  24 tensors, [\d.]+ kB \(\d+ bytes\)$", out, re.M)
    assert re.search(r"^  BF16 +24 tensors, [\d.]+ kB$", out, re.M)


@pytest.mark.parametrize("globs, pattern", [
    (["*.mlp.*"], r"\.mlp\."),
    (["model.norm.weight"], r"^model\.norm\.weight$"),
    (["*q_norm*", "*.k_norm.weight"], r"[qk]_norm"),
    (["model.layers.[1]*"], r"^model\.layers\.1\."),
    (["*"], ""),
])
def test_keys_choose(penstock, model, globs, pattern):
    folder = model()
    args = [word for glob in globs for word in ("--keys", glob)]
    found = inspect(penstock, folder, *args)
    names = [entry["name"] for entry in inspect(penstock, folder)["tensors"]]
    chosen = [name for name in names if re.search(pattern, name)]
    assert [entry["name"] for entry in found["tensors"]] == chosen and chosen
    assert found["total"]["tensors"] == len(chosen)


def test_keys_that_match_nothing_tell_some_names(penstock, model):
    error = penstock.fails("inspect", model(), "-k", "transformer.*")
    assert error["errno"] == "ENOENT" and "'transformer.*'" in error["message"]
    assert "model.embed_tokens.weight" in error["hint"]


def test_too_many_keys_are_told(penstock, model):
    args = ["-k", "x"] * 65
    error = penstock.fails("inspect", model(), *args, status=2)
    assert "64 times at most" in error["message"]


def test_names_cannot_command_the_terminal(penstock, tmp_path):
    names = {"a\nb": r"a\nb", "\x1b[2J": r"\x1b[2J", "\x7f": r"\x7f", "t\tt": r"t\tt",
             "\u0085": r"\u0085", "back\\slash": r"back\\slash", "\u00e4\u4e2d": "\u00e4\u4e2d"}
    header = {"__metadata__": {"\x1b]0;x\x07": "\r"}}
    for i, name in enumerate(names):
        header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
    path = write(tmp_path / "x.safetensors", header, bytes(len(names)))
    result = penstock.ok("inspect", path)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.out)
    for shown in names.values():
        assert re.search(rf"^  {re.escape(shown)} +U8 ", result.out, re.M), shown
    assert r"\x1b]0;x\x07: \x0d" in result.out
    assert {entry["name"] for entry in inspect(penstock, path)["tensors"]} == set(names)


def test_names_that_hold_nul(penstock, tmp_path):
    names = {"a": "a", "a\0": r"a\x00", "a\0b": r"a\x00b"}
    header = {"__metadata__": {"k\0": "v\0w", "k": "x"}}
    for i, name in enumerate(names):
        header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
    path = write(tmp_path / "x.safetensors", header, bytes(len(names)))
    out = penstock.ok("inspect", path).out
    for shown in names.values():
        assert re.search(rf"^  {re.escape(shown)} +U8 ", out, re.M), shown
    assert "\0" not in out and r"k\x00: v\x00w" in out and "k: x" in out
    found = inspect(penstock, path)
    assert [entry["name"] for entry in found["tensors"]] == list(names)
    assert found["files"][0]["metadata"] == {r"k\x00": "v\0w", "k": "x"}
    hashes = penstock.ok("load", "-d", "host", "--hash", path).out
    assert re.search(r"  a\\x00b$", hashes, re.M)
    for glob, chosen in (("a", ["a"]), ("a?b", ["a\0b"]), ("a*", list(names)), ("*b", ["a\0b"])):
        listed = inspect(penstock, path, "-k", glob)["tensors"]
        assert [entry["name"] for entry in listed] == chosen


def test_scalars_empty_tensors_and_empty_files(penstock, tmp_path):
    path = write(tmp_path / "a.safetensors", {
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "empty": {"dtype": "F32", "shape": [3, 0, 2], "data_offsets": [4, 4]}}, bytes(4))
    shapes = {entry["name"]: (entry["shape"], entry["bytes"])
              for entry in inspect(penstock, path)["tensors"]}
    assert shapes == {"scalar": ([], 4), "empty": ([3, 0, 2], 0)}
    assert re.search(r"^  scalar +F32 +\[\] +4 ", penstock.ok("inspect", path).out, re.M)
    nothing = write(tmp_path / "b.safetensors", {})
    assert inspect(penstock, nothing)["total"] == {
        "tensors": 0, "bytes": 0, "stored_bytes": 0, "dtypes": []}
    assert "0 tensors, 0 B" in penstock.ok("inspect", nothing).out


def test_tensor_that_the_index_does_not_list_is_a_warning(penstock, model):
    folder = model(2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    found = inspect(penstock, folder)
    assert len(found["warnings"]) == 1 and "model.norm.weight" in found["warnings"][0]
    assert re.search(r"^  warning: .*model\.norm\.weight", penstock.ok("inspect", folder).out, re.M)


# ---------------------------------------------------------------------------- broken models --

GOOD = {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


@pytest.mark.parametrize("break_it", [
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\x08\0\0"),
    lambda path: write(path, b"no json!", bytes(4)),
    lambda path: write(path, GOOD, bytes(3)),
    lambda path: write(path, GOOD, bytes(5)),
    lambda path: write(path, GOOD, bytes(4), length=1 << 40),
    lambda path: write(path, {"x": {**GOOD["x"], "dtype": "F7"}}, bytes(4)),
    lambda path: write(path, {"x": {**GOOD["x"], "shape": [5]}}, bytes(4)),
    lambda path: write(path, b'{"x": 1, "x": 2}', bytes(4)),
])
def test_broken_file_is_told_with_its_name(penstock, tmp_path, break_it):
    path = tmp_path / "x.safetensors"
    break_it(path)
    error = penstock.fails("inspect", path)
    assert error["domain"] == "format" and error["object"] == str(path)
    assert error["message"] and error["hint"]


def test_truncated_shard_of_a_model(penstock, model):
    folder = model(3)
    shard = folder / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    error = penstock.fails("inspect", folder)
    assert error["object"] == str(shard) and error["domain"] == "format"


def test_missing_shard(penstock, model):
    folder = model(3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    error = penstock.fails("inspect", folder)
    assert "model-00002-of-00003.safetensors" in error["object"] + error["message"]


def test_paths_that_are_no_model(penstock, tmp_path):
    assert penstock.fails("inspect", tmp_path / "no")["errno"] == "ENOENT"
    (tmp_path / "folder").mkdir()
    error = penstock.fails("inspect", tmp_path / "folder")
    assert error["object"] == str(tmp_path / "folder") and error["hint"]
    (tmp_path / "folder" / "model.bin").write_bytes(b"x" * 100)
    penstock.fails("inspect", tmp_path / "folder")
    penstock.fails("inspect", tmp_path / "folder" / "model.bin")
    os.mkfifo(tmp_path / "x.safetensors")
    penstock.fails("inspect", tmp_path / "x.safetensors", timeout=10)


def test_file_without_permission(penstock, open_dir):
    path = write(open_dir / "x.safetensors", GOOD, bytes(4))
    path.chmod(0)
    result = as_nobody("inspect", path, "--json")
    assert result.status == 1 and result.error["errno"] == "EACCES" and str(path) in result.err


def test_inspect_takes_a_model(penstock):
    assert "MODEL" in penstock.fails("inspect", status=2)["message"]


def test_several_files_are_one_model(penstock, model):
    folder = model(3)
    files = sorted(folder.glob("*.safetensors"))
    whole, listed = inspect(penstock, folder), inspect(penstock, *files)
    assert [file["name"] for file in listed["files"]] == list(map(str, files))
    place = lambda found: {entry["name"]: (entry["offset"], entry["bytes"]) for entry
                           in found["tensors"]}
    assert place(listed) == place(whole) and listed["total"] == whole["total"]
    assert listed["model"] == f"{files[0]} and 2 more"
    assert len(inspect(penstock, *files[:2])["tensors"]) < len(whole["tensors"])
    error = penstock.fails("inspect", files[0], files[1], files[0])
    assert error["object"] == str(files[0]) and "is also in" in error["message"]


def test_json_members_are_in_the_man_page(penstock, model):
    found = inspect(penstock, model(2))
    for file in found["files"]:
        file["metadata"] = {}    # its members are the file's own
    assert members(found) <= documented_members("inspect")
