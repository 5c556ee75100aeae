#!/bin/sh
# SPDX-License-Identifier: MIT
# Makes the fat binary of src/kernels anew, after one of its sources was changed:
#   tools/build-kernels.sh                writes src/kernels/image.fatbin and image.sha256
#
# Needs network for its tools, which go into a folder that is thrown away: NVRTC and nvFatbin, the
# compiler and the linker of CUDA as libraries. No GPU and no CUDA toolkit are needed. They are of
# 12.8, the first that knows sm_120: what it makes loads with drivers from 12.0 on (525), and its
# PTX from 12.8 on (570), which GPUs that have no machine code here need anyway.
set -eu
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

python3 -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check --no-deps \
	nvidia-cuda-nvrtc-cu12==12.8.93 nvidia-nvfatbin-cu12==12.8.90
"$work/tools/bin/python" tools/build_kernels.py
