# SPDX-License-Identifier: MIT
"""Options, help and messages; the table, the help and the man pages say the same."""
import re
import shutil
import subprocess

import pytest

from cli_program import ROOT

COMMANDS = ["load", "inspect", "verify", "ckpt", "copy", "explain", "pack", "unpack", "make-model",
            "completion"]


def table(penstock, command):
    """The options of a command: (long name, short name, value) for each."""
    lines = penstock.ok(command, "--help-options").out.splitlines()
    return [tuple(line.split("\t")) for line in lines]


def test_version_is_the_header_s(penstock):
    header = (ROOT / "include" / "penstock.h").read_text()
    version = re.search(r'#define PEN_VERSION "(.*)"', header).group(1)
    for spelling in ("--version", "-V", "version"):
        assert penstock.ok(spelling).out == f"penstock {version}\n"


def test_help_lists_every_command(penstock):
    for spelling in ("--help", "-h", "help"):
        out = penstock.ok(spelling).out
        assert all(re.search(rf"^  {command} ", out, re.M) for command in COMMANDS)


def test_no_command_shows_usage_and_fails(penstock):
    result = penstock()
    assert result.status == 2 and result.out == "" and "Usage: penstock" in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_all_its_options(penstock, command):
    out = penstock.ok(command, "--help").out
    assert out == penstock.ok("help", command).out == penstock.ok(command, "-h").out
    for name, letter, value in table(penstock, command):
        left = (f"{letter}, " if letter else "    ") + name + (f" {value}" if value else "")
        assert re.search(rf"^  {re.escape(left)}( |$)", out, re.M), left
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_shown_even_if_the_rest_is_wrong(penstock, command):
    assert "Usage:" in penstock.ok(command, "--nonsense", "--help").out


@pytest.mark.parametrize("command", COMMANDS)
def test_man_page_has_the_options_of_the_table(penstock, command):
    page = (ROOT / "man" / f"penstock-{command}.1").read_text()
    documented = []
    for item in re.findall(r"^\.It (Fl .*)$", page, re.M):
        words = item.replace("Ns | Ns", "|").replace(" | ", "|").replace("|Cm ", "|").split()
        names = [f"-{name}" for name in re.findall(r"Fl (\S+)", item)]
        value = words[-1] if words[-2] in ("Ar", "Cm") else ""
        documented.append((names[-1], names[0] if len(names) > 1 else "", value))
    assert documented == table(penstock, command)


@pytest.mark.parametrize("page", ["penstock", *(f"penstock-{name}" for name in COMMANDS)])
def test_man_page_is_well_formed(page):
    if not shutil.which("mandoc"):
        pytest.skip("mandoc is not installed")
    path = ROOT / "man" / f"{page}.1"
    lint = subprocess.run(["mandoc", "-Tlint", "-Wwarning", path], capture_output=True, text=True)
    assert lint.returncode == 0 and lint.stdout == "", lint.stdout
    for section in ("EXAMPLES", "EXIT STATUS"):
        assert f".Sh {section}" in path.read_text()


def test_the_same_option_has_the_same_letter_everywhere(penstock):
    letters, names = {}, {}
    for command in COMMANDS:
        for name, letter, value in table(penstock, command):
            where = f"{name} {letter} of {command}"
            assert letters.setdefault(name, letter) == letter, where
            assert not letter or names.setdefault(letter, name) == name, where
    assert names["-d"] == "--device" and names["-h"] == "--help"


def members(value):
    """The names of all members of a JSON value, however deep."""
    if isinstance(value, list):
        return set().union(*map(members, value))
    if isinstance(value, dict):
        return set(value) | set().union(*map(members, value.values()))
    return set()


def documented_members(command):
    page = (ROOT / "man" / f"penstock-{command}.1").read_text()
    return set(re.findall(r"\w+", " ".join(re.findall(r"^\.(?:It )?Va (.*)$", page, re.M))))


@pytest.mark.parametrize("command, args", [("copy", ["host:", "--verify"]), ("explain", [])])
def test_json_members_are_in_the_man_page(penstock, source, command, args):
    result = penstock.ok(command, source, *args, "--json")
    assert members(result.json) <= documented_members(command)


def test_json_members_of_an_error_are_in_the_man_page(penstock):
    result = penstock("copy", "/nowhere", "host:", "--json")
    assert members(result.json) <= documented_members("copy")


@pytest.mark.parametrize("wrong, right", [("cpoy", "copy"), ("exp", "explain"), ("hepl", "help")])
def test_unknown_command_suggests_the_nearest(penstock, wrong, right):
    result = penstock(wrong)
    assert result.status == 2 and f"Did you mean 'penstock {right}'?" in result.err


def test_unknown_command_that_is_like_none_points_to_help(penstock):
    result = penstock("teleport")
    assert result.status == 2 and "penstock help" in result.err and "mean" not in result.err


@pytest.mark.parametrize("wrong, right", [("--lane", "--lanes"), ("--verfy", "--verify"),
                                          ("--memory_limit", "--memory-limit"),
                                          ("--req", "--request-size")])
def test_unknown_option_suggests_the_nearest(penstock, wrong, right):
    error = penstock.fails("copy", wrong, "a", "b", status=2)
    assert error["object"] == wrong and error["hint"] == f"Did you mean {right}?"


@pytest.mark.parametrize("args, message", [
    (["--lanes", "0"], "'0' is not a whole number from 1 to 64"),
    (["--lanes", "65"], "'65' is not a whole number from 1 to 64"),
    (["--lanes", "two"], "'two' is not a whole number"),
    (["--lanes", "-1"], "'-1' is not a whole number"),
    (["--lanes="], "'' is not a whole number"),
    (["--depth", "99999999999999999999"], "is not a whole number"),
    (["--size", "12Q"], "'12Q' is not a size"),
    (["--size", "-5"], "'-5' is not a size"),
    (["--offset", "9E"], "'9E' is not a size"),
    (["--memory-limit", "1"], "'1' is not a size from"),
    (["--request-size", "4G"], "'4G' is not a size from"),
    (["--cache", "maybe"], "'maybe' is not one of auto|keep|after|drop|off"),
    (["--transfer", "warp"], "warp"),
    (["--transfer", "9"], "9"),
    (["--quiet=yes"], "it takes no value"),
    (["-x"], "there is no such option"),
    (["-qx"], "there is no such option"),
])
def test_wrong_value_is_refused_with_what_would_be_right(penstock, args, message):
    error = penstock.fails("copy", *args, "a", "b", status=2)
    assert error["operation"] == "use" and message in error["message"]


def test_missing_value_is_told(penstock):
    result = penstock("copy", "a", "b", "--size")
    assert result.status == 2 and "cannot use --size: its value is missing" in result.err


@pytest.mark.parametrize("args, message", [
    ([], "SRC DST are missing"),
    (["a"], "it takes SRC DST, and only 1 argument was given"),
    (["a", "b", "c"], "it takes SRC DST and nothing else, and 3 arguments were given"),
])
def test_copy_takes_two_sides(penstock, args, message):
    assert penstock.fails("copy", *args, status=2)["message"] == message


@pytest.mark.parametrize("args", [[], ["a", "b"]])
def test_explain_takes_one_path(penstock, args):
    assert "PATH" in penstock.fails("explain", *args, status=2)["message"]


def test_json_counts_wherever_it_stands(penstock):
    before, after = penstock("copy", "--json", "--bad"), penstock("copy", "--bad", "--json")
    assert before.json == after.json and before.status == after.status == 2


def test_options_may_stand_anywhere_in_any_form(penstock, source, tmp_path):
    out = tmp_path / "out"
    forms = (["--size=1M", source, out], [source, "--size", "1M", out], [source, out, "--size=1M"],
             ["-t", "auto", "--size", "1M", "--", source, out],
             ["-tauto", "--size=1M", source, out], ["-qtauto", "--size=1M", source, out])
    for args in forms:
        assert penstock.report(*args)["bytes"] == 1 << 20, args


def test_after_two_dashes_all_are_operands(penstock, source, tmp_path):
    penstock.ok("copy", "-q", "--", source, "--verify", cwd=tmp_path)
    assert (tmp_path / "--verify").read_bytes() == source.read_bytes()


def test_output_that_cannot_be_written_is_a_failure(penstock):
    with open("/dev/full", "w") as full:
        result = penstock("copy", "pattern:1M", "host:", stdout=full)
    assert result.status == 1 and "No space left" in result.err
