# SPDX-License-Identifier: MIT
"""Which names keys= asks for: names, globs as fnmatch has them, and very many of them."""
import random
import time
from fnmatch import fnmatchcase

import pytest

penstock = pytest.importorskip("penstock")
from penstock._choose import wanted  # noqa: E402

NAMES = dict.fromkeys(["a", "b", "a.b", "a.b.weight", "a.bias", "[x]", "x*", "", "a\nb", "a\0b",
                       "\u20ac.weight"])


@pytest.mark.parametrize("keys", [
    "*", "a*", "*weight", "a.*t", "a.?", "?", "??", "a?b", "[ab]", "[!ab]", "[a-b]*", "[]x[]*",
    "*[*", "[[]x]", "*[!]]", "a[.\n\0]b", "a**b", "***", "*.*.*", "?*?", "[!a-z]*", "[b-a]*",
    "[!b-a]*", "\u20ac*", "*[", "[x", ["a*", "b*"], ["?", "*.weight", "[x]"], ["x*", "*t"],
    ["a", "*.*", "a"]], ids=repr)
def test_globs_match_as_fnmatch_does(keys):
    globs = [keys] if isinstance(keys, str) else keys
    matches = {glob: [glob] if glob in NAMES else [n for n in NAMES if fnmatchcase(n, glob)]
               for glob in globs}
    if all(matches.values()):
        assert wanted(NAMES, keys) == [n for n in NAMES if any(n in m for m in matches.values())]
    else:
        with pytest.raises(penstock.Error, match="none of this name"):
            wanted(NAMES, keys)


def test_random_globs_match_as_fnmatch_does():
    rng = random.Random(6)
    for _ in range(3000):
        names = dict.fromkeys("".join(rng.choices("ab.[]!-\\^\n", k=rng.randrange(6)))
                              for _ in range(8))
        globs = ["".join(rng.choices("ab.**??[]!-\\^", k=rng.randrange(1, 7))) + "*"
                 for _ in range(rng.randrange(1, 5))]
        matches = {glob: {n for n in names if fnmatchcase(n, glob)} for glob in globs}
        matches.update((glob, {glob}) for glob in globs if glob in names)
        missing = next((glob for glob in globs if not matches[glob]), None)
        if missing is None:
            chosen = set().union(*matches.values())
            assert wanted(names, globs) == [n for n in names if n in chosen], (globs, names)
        else:
            with pytest.raises(penstock.Error) as caught:
                wanted(names, globs)
            assert caught.value.filename == missing, (globs, names)


def test_the_first_glob_that_matches_nothing_is_named():
    with pytest.raises(penstock.Error, match=r"find tensor no\*: the model has none of this name"):
        wanted(NAMES, ["a*", "no*", "nor*", "*weight"])


@pytest.mark.parametrize("glob", ["model.layers.%d.*", "*.layers.%d.*", "*.%d.*.weight", "*%d*",
                                  "*layers.%d.*[qk]_proj.w?i*"])
def test_many_globs_cost_little_more_than_one_look_at_each_letter(glob):
    """Measured against just that, in time of this process: one by one they take thousands."""
    names = dict.fromkeys(f"model.layers.{i // 8}.{i}.{'qk'[i % 2]}_proj.weight"
                          for i in range(8 * 590))
    globs = [glob % i for i in range(590)]
    seen = dict.fromkeys(map(chr, range(128)), 0)
    start = time.process_time()
    for name in names:
        for letter in name:
            seen[letter] += 1
    middle = time.process_time()
    assert len(wanted(names, globs)) == len(names)
    assert time.process_time() - middle < 200 * (middle - start)
