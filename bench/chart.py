#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Bars as SVG, for documents.

    bench/chart.py COMPARED.json CHART.svg [--state warm] [--title TEXT]
    bench/chart.py ROUNDS.json CHART.svg --case WORD --bar NAME=LABEL... [--title TEXT]

draws the medians of a state that `python -m penstock.compare --json` has found, the fastest first,
or of a case of bench/saving.py or bench/checkpointing.py, with a line from the least to the most.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

OURS, OTHERS = "#e8833a", "#8a8f98"
LEFT, WIDTH, STEP = 250, 360, 34


@dataclass(frozen=True)
class Bar:
    """`least` and `most` are the range that a line shows; the same: there is none."""

    label: str
    value: float
    ours: bool = False
    least: float = 0.0
    most: float = 0.0


def _drawn(bar: Bar, top: int, scale: float) -> str:
    end = LEFT + bar.value * scale
    parts = [f'<text x="{LEFT - 10}" y="{top + 16}" text-anchor="end">{escape(bar.label)}</text>',
             f'<rect x="{LEFT}" y="{top}" width="{bar.value * scale:.1f}" height="24" '
             f'fill="{OURS if bar.ours else OTHERS}"/>']
    if bar.least < bar.most:
        end = LEFT + bar.most * scale
        parts.append(f'<path d="M{LEFT + bar.least * scale:.1f} {top + 12}H{end:.1f}" '
                     'stroke="black"/>')
    parts.append(f'<text x="{end + 6:.1f}" y="{top + 16}">{bar.value:.3g}</text>')
    return "".join(parts)


def bars(title: str, rows: list[Bar]) -> str:
    """The picture, one bar under the other."""
    scale = WIDTH / max((max(bar.value, bar.most) for bar in rows), default=1.0)
    body = "\n".join(_drawn(bar, 40 + STEP * at, scale) for at, bar in enumerate(rows))
    return ('<svg xmlns="http://www.w3.org/2000/svg" width="680" '
            f'height="{50 + STEP * len(rows)}" font-family="sans-serif" font-size="13">\n'
            '<rect width="100%" height="100%" fill="white"/>\n'
            f'<text x="10" y="22" font-size="14">{escape(title)}</text>\n{body}\n</svg>\n')


def compared(found: dict, state: str) -> list[Bar]:
    """What compare has measured of a state."""
    rows = []
    for row in found["loaders"]:
        seconds = row["states"].get(state, {}).get("seconds")
        if seconds:
            label = row["label"] + (f", {row['setting']}" if row["setting"] != "none" else "")
            rows.append(Bar(label, seconds["median"], row["name"].startswith("penstock"),
                            seconds["min"], seconds["max"]))
    return sorted(rows, key=lambda bar: bar.value)


def played(found: dict, case: str, labels: dict[str, str]) -> list[Bar]:
    """What a bench has measured in the rounds of a case, by the names that it has for them."""
    rows = []
    for name, label in labels.items():
        values = [each[name] for each in found["rounds"].get(case, ()) if name in each]
        if values:
            rows.append(Bar(label, statistics.median(values), name.startswith("penstock"),
                            min(values), max(values)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("measured", type=Path)
    parser.add_argument("chart", type=Path)
    parser.add_argument("--state", default="warm")
    parser.add_argument("--case")
    parser.add_argument("--bar", action="append", default=[])
    parser.add_argument("--title", default="seconds to load")
    asked = parser.parse_args()
    found = json.loads(asked.measured.read_text(encoding="utf-8"))
    if asked.case is None:
        rows = compared(found, asked.state)
    else:
        rows = played(found, asked.case, dict(each.split("=", 1) for each in asked.bar))
    if not rows:
        parser.error(f"{asked.measured} has no figures of {asked.case or asked.state!r}")
    asked.chart.write_text(bars(asked.title, rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
