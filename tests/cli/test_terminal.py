# SPDX-License-Identifier: MIT
"""Signals and the progress bar: what someone at a terminal meets."""
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time

import pytest

from cli_program import PROGRAM, pattern

SLOW = "pattern:2G,rate=200M"


def start_and_signal(penstock, args, *numbers, delay=0.5, **options):
    """Run, send the signals after a while; the result and how long the end took after them."""
    process = penstock.start(*args, **options)
    time.sleep(delay)
    assert process.poll() is None, process.communicate()
    sent = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.05)
    result = penstock.finish(process, args, timeout=20)
    return result, time.monotonic() - sent


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143),
                                            (signal.SIGHUP, 129)])
def test_signal_ends_a_copy_at_once_with_the_target_as_it_was(penstock, tmp_path, number, status):
    out = tmp_path / "out"
    out.write_bytes(b"old")
    result, took = start_and_signal(penstock, ["copy", SLOW, out], number)
    assert result.status == status and took < 2
    assert result.err == f"penstock: interrupted; {out} was left as it was\n"
    assert out.read_bytes() == b"old" and os.listdir(tmp_path) == ["out"]


def test_interruption_is_an_error_in_json(penstock, tmp_path):
    args = ["copy", SLOW, tmp_path / "out", "--json"]
    result, _ = start_and_signal(penstock, args, signal.SIGINT)
    assert result.status == 130 and result.error["errno"] == "ECANCELED"
    assert "interrupted" in result.error["message"] and os.listdir(tmp_path) == []
    assert result.error["operation"] == "copy to" and result.error["hint"]


def test_interruption_of_a_read_into_memory(penstock):
    result, took = start_and_signal(penstock, ["copy", SLOW, "host:"], signal.SIGINT)
    assert result.status == 130 and took < 2 and result.err == "penstock: interrupted\n"


def test_interruption_in_place_does_not_claim_too_much(penstock, tmp_path):
    out = tmp_path / "out"
    out.write_bytes(b"old")
    result, _ = start_and_signal(penstock, ["copy", SLOW, out, "--in-place"], signal.SIGINT)
    assert result.status == 130 and "may hold some of the new bytes" in result.err


def test_interruption_in_place_of_a_new_file_leaves_none(penstock, tmp_path):
    out = tmp_path / "out"
    result, _ = start_and_signal(penstock, ["copy", SLOW, out, "--in-place"], signal.SIGINT)
    assert result.err == f"penstock: interrupted; {out} was left as it was\n"
    assert os.listdir(tmp_path) == []


def test_second_interruption_ends_the_process(penstock, tmp_path):
    out = tmp_path / "out"
    out.write_bytes(b"old")
    args = ["copy", "pattern:64M,latency=8s", out]
    result, took = start_and_signal(penstock, args, signal.SIGINT, signal.SIGINT)
    assert result.status in (130, -signal.SIGINT) and took < 2
    assert out.read_bytes() == b"old" and os.listdir(tmp_path) == ["out"]


def test_terminal_that_closes_may_say_so_twice(penstock, tmp_path):
    args = ["copy", SLOW, tmp_path / "out"]
    result, _ = start_and_signal(penstock, args, signal.SIGHUP, signal.SIGHUP)
    assert result.status == 129 and "interrupted" in result.err and os.listdir(tmp_path) == []


def test_ignored_interruption_stays_ignored(penstock, tmp_path):
    out = tmp_path / "out"
    result, _ = start_and_signal(
        penstock, ["copy", "-q", "pattern:40M,rate=40M", out], signal.SIGINT, delay=0.3,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert result.status == 0 and out.read_bytes() == pattern(40 << 20)


# --------------------------------------------------------------------------------- the bar --

def on_terminal(penstock, *args, columns=80, **env):
    """Run with standard error on a terminal: status, standard output, what the terminal got."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([PROGRAM, *args], stderr=slave,
                               stdout=subprocess.PIPE, env={**penstock.env, "TERM": "xterm", **env})
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:     # EIO: the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    out, _ = process.communicate(timeout=30)
    return process.returncode, out.decode(), shown.decode()


def drawings(shown):
    """Each state of the line, as it was drawn."""
    return [line for line in shown.split("\r\x1b[K") if line]


def test_bar_shows_percent_rate_and_time_left(penstock):
    status, out, shown = on_terminal(penstock, "copy", "pattern:60M,rate=60M", "null:")
    lines = drawings(shown)
    assert status == 0 and 3 <= len(lines) <= 15
    for line in lines:
        assert re.fullmatch(r"copying +\d+ %  =*\.*  +\d+\.\d\d GB/s  (\d+:\d\d left)?", line), line
        assert len(line) < 80
    percents = [int(re.search(r"(\d+) %", line).group(1)) for line in lines]
    assert percents == sorted(percents) and percents[0] < 60 < percents[-1]
    assert any("0.0" in line and "left" in line for line in lines)


def test_bar_leaves_no_trace(penstock):
    _, out, shown = on_terminal(penstock, "copy", "pattern:30M,rate=60M", "null:")
    assert shown.endswith("\r\x1b[K") and out.startswith("31.5 MB in ")


def test_bar_and_json_do_not_mix(penstock):
    status, out, shown = on_terminal(penstock, "copy", "pattern:30M,rate=60M", "null:", "--json")
    assert status == 0 and out.startswith("{") and "copying" in shown


@pytest.mark.parametrize("columns", [20, 40, 300])
def test_bar_fits_the_terminal(penstock, columns):
    _, _, shown = on_terminal(penstock, "copy", "pattern:30M,rate=60M", "null:", columns=columns)
    assert drawings(shown) and all(len(line) < columns for line in drawings(shown))


def test_no_bar_for_what_is_over_at_once(penstock):
    assert on_terminal(penstock, "copy", "pattern:64K", "null:")[2] == ""


def test_no_bar_if_quiet_or_on_a_dumb_terminal(penstock):
    args = ["copy", "pattern:30M,rate=60M", "null:"]
    assert on_terminal(penstock, *args, "--quiet")[2] == ""
    assert on_terminal(penstock, *args, TERM="dumb")[2] == ""


def test_no_bar_without_a_terminal(penstock):
    assert penstock("copy", "pattern:30M,rate=60M", "null:").err == ""


def test_interruption_wipes_the_bar_first(penstock, tmp_path):
    master, slave = pty.openpty()
    process = penstock.start("copy", SLOW, tmp_path / "out", stderr=slave)
    os.close(slave)
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=10)
    shown = os.read(master, 65536).decode()
    os.close(master)
    process.stdout.close()
    assert re.search(r"\r\x1b\[Kpenstock: interrupted; .* was left as it was\r\n$", shown)
