# SPDX-License-Identifier: MIT
"""Globs over names of tensors, as fnmatch has them: any number of them at the cost of few."""
from __future__ import annotations

import re

_GLOB = re.compile(r"[*?\[]")


def is_glob(text: str) -> bool:
    """Has it characters that mean others?"""
    return _GLOB.search(text) is not None


def _parts(glob: str) -> list[str]:
    """The letters of a glob, its classes whole; stars side by side are one."""
    parts, at = [], 0
    while at < len(glob):
        end = at + 1
        if glob[at] == "[":
            # As fnmatch has it: a bracket after [ or [! is none yet, and one never closed a letter.
            first = at + 1 + glob.startswith("!", at + 1)
            close = glob.find("]", first + glob.startswith("]", first))
            end = close + 1 if close >= 0 else end
        if glob[at] != "*" or parts[-1:] != ["*"]:
            parts.append(glob[at:end])
        at = end
    return parts


class _State(dict):
    """Where all globs stand after the beginning of a name; what comes after each next letter."""

    __slots__ = ("machine", "bits", "hit")

    def __init__(self, machine: Globs, bits: int, hit: int):
        self.machine, self.bits, self.hit = machine, bits, hit

    def __missing__(self, letter: str) -> _State:
        machine = self.machine
        bits = (self.bits & machine.movers(letter)) << 1 | self.bits & machine.stars
        state = self[letter] = machine.state(bits)
        return state


class Globs:
    """Any number of globs that look at a name together, letter by letter.

    Each part of each glob is a bit: it is set where all parts before it have matched the beginning
    of the name. A letter moves bits up by one, stars keep theirs. Names begin alike, so states are
    kept: most letters cost one lookup, however many globs there are. A glob that has come to a star
    at its end has matched and is forgotten by the states that follow, which makes them few.
    """

    STATES = 4096

    def __init__(self, globs: list[str]):
        self.globs = globs
        self.stars = self.ends = self.any = self.begins = self.last_stars = 0
        self.letters: dict[str, int] = {}
        self.classes: dict[str, int] = {}
        #: Which glob each bit of `ends` belongs to.
        self.numbers: dict[int, int] = {}
        bit = 1
        for glob in globs:
            self.begins |= bit
            for part in _parts(glob):
                self._add(part, bit)
                bit <<= 1
            self.ends |= bit
            self.numbers[bit] = len(self.numbers)
            if glob.endswith("*"):
                self.last_stars |= bit >> 1
            bit <<= 1
        self.moves: dict[str, int] = {}
        self.states: dict[tuple[int, int], _State] = {}
        self.start = self.state(self.begins)
        self.matched = 0

    def _add(self, part: str, bit: int) -> None:
        if part == "*":
            self.stars |= bit
        elif part == "?":
            self.any |= bit
        else:
            kind = self.classes if len(part) > 1 else self.letters
            kind[part] = kind.get(part, 0) | bit

    def movers(self, letter: str) -> int:
        """The parts that match this letter."""
        if letter not in self.moves:
            from fnmatch import fnmatchcase

            bits = self.any | self.letters.get(letter, 0)
            for part, wanting in self.classes.items():
                if fnmatchcase(letter, part):
                    bits |= wanting
            self.moves[letter] = bits
        return self.moves[letter]

    def state(self, bits: int) -> _State:
        """The state with these bits, and those after stars, which match nothing as well."""
        bits |= (bits & self.stars) << 1
        last = bits & self.last_stars
        bits &= ~(last | last << 1)
        if (bits, last) not in self.states:
            self.states[bits, last] = _State(self, bits, last << 1)
        return self.states[bits, last]

    def _look(self, name: str) -> int:
        """Those bits of `ends` whose globs match; they are remembered."""
        if len(self.states) > self.STATES:
            self.states.clear()
            self.start = self.state(self.begins)
        state = self.start
        matched = state.hit
        for letter in name:
            state = state[letter]
            if state.hit:
                matched |= state.hit
        matched |= state.bits & self.ends
        self.matched |= matched
        return matched

    def match(self, name: str) -> bool:
        """Whether some glob matches."""
        return self._look(name) != 0

    def first(self, name: str) -> int | None:
        """The number of the first glob that matches; None where none does."""
        matched = self._look(name)
        return self.numbers[matched & -matched] if matched else None

    def unused(self) -> list[str]:
        """Globs that have matched nothing, in their order."""
        ends, unused = self.ends, []
        for glob in self.globs:
            last = ends & -ends
            if not self.matched & last:
                unused.append(glob)
            ends ^= last
        return unused
