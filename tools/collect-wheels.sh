#!/bin/sh
# SPDX-License-Identifier: MIT
# Collects the loaders that `python -m penstock.compare` measures beside Penstock, as wheels for
# x86_64 and Python 3.12, for a server without network:
#
#   tools/collect-wheels.sh wheels        here, on a machine with network
#   bench/gpu-compare.sh build            there; it installs them into folders of their own
#
# Only the wheels themselves are taken, not what they depend on: torch, numpy and cupy are large and
# a GPU server has them. PYTHON is the interpreter whose pip downloads (default: python3), and
# PENSTOCK_WHEELS_VERSION the Python of the server (default: 3.12).
set -eu

# What a server with torch and transformers lacks. fastsafetensors names typer, for its command
# line alone; Run:ai wants humanize; KvikIO the three after it.
packages="
fastsafetensors==0.5.0
instanttensor==0.2.2
safetensors==0.9.0rc1
runai-model-streamer==0.17.0
humanize
kvikio-cu13==26.10.*
libkvikio-cu13==26.10.*
rapids-logger==0.3.*
cuda-pathfinder
"

if [ $# != 1 ]; then
	echo "usage: tools/collect-wheels.sh DIRECTORY" >&2
	exit 2
fi
python=${PYTHON:-python3}
version=${PENSTOCK_WHEELS_VERSION:-3.12}
"$python" -m pip --version >/dev/null 2>&1 || {
	echo "collect-wheels: $python has no pip; name another with PYTHON" >&2
	exit 1
}
mkdir -p "$1"
target=$(cd "$1" && pwd)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'exit 1' HUP INT TERM

set -- --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
	--abi "cp$(echo "$version" | tr -d .)" --abi abi3 --abi none --platform any \
	--platform manylinux2014_x86_64
for glibc in 17 24 27 28 30 34; do
	set -- "$@" --platform manylinux_2_${glibc}_x86_64
done

# shellcheck disable=SC2086
"$python" -m pip download --quiet "$@" -d "$target" $packages >"$log" 2>&1 || {
	cat "$log" >&2
	echo "collect-wheels: the wheels could not be downloaded; is there a network?" >&2
	exit 1
}

echo "collected into $target ($(du -sh "$target" | cut -f1)):"
for wheel in "$target"/*.whl; do
	echo "  $(basename "$wheel" .whl)"
done
