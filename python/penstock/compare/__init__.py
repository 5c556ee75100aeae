# SPDX-License-Identifier: MIT
"""python -m penstock.compare MODEL: Penstock beside the other ways to load a model.

Every loader runs in a process of its own, which brings the device up, starts the clock, loads, and
stops it when the last tensor can be used. Loaders take turns, round after round; before each run
the page cache is put into the state that is asked for (warm, cold, mixed) and looked at. The
machine's ceilings are measured in the same minutes, by plain loops that use nothing of Penstock.
The bytes that a loader delivers are checked, and one that is missing, fails, hangs or delivers
something else is named with its reason.

  model.py     which files and tensors there are            cache.py    the page cache's state
  loaders.py   how each loader is called                    measure.py  clock, memory, fingerprints
  worker.py    the process that runs one loader             runner.py   starts workers, in turns
  ceilings.py  what the hardware gives to plain loops       startup.py  from process start, bare
  schedule.py  states, rounds, turns                        report.py   table, words, JSON, plot
  __main__.py  options

The modules import each other relatively and nothing of Penstock itself, so that a worker for
somebody else's loader never has Penstock in its memory.
"""
