#!/bin/sh
# SPDX-License-Identifier: MIT
# What `make demo` runs once everything is built: bench/demo.c, with a folder for its files.
#
#   tools/demo.sh BUILD [SIZE]
#
# The files lie in demo-data/ of the checkout, or in PENSTOCK_DEMO_DIR, take three times SIZE
# (1 GiB), and are removed at the end.
set -eu
cd "$(dirname "$0")/.."

program=${1:?usage: tools/demo.sh BUILD [SIZE]}/bench/demo
size=${2:-1G}
data=${PENSTOCK_DEMO_DIR:-demo-data}

made=
if [ ! -d "$data" ]; then
	mkdir -p "$data" 2>/dev/null || {
		echo "demo: $data cannot be made; PENSTOCK_DEMO_DIR=/some/folder names another" >&2
		exit 1
	}
	made=$data
fi
if [ ! -w "$data" ]; then
	echo "demo: $data cannot be written; PENSTOCK_DEMO_DIR=/some/folder names another" >&2
	exit 1
fi
# shellcheck disable=SC2317
clean() {
	rm -f "$data/demo.bin" "$data/demo.plain"
	[ -z "$made" ] || rmdir "$made"
}
trap clean EXIT
trap 'exit 1' HUP INT TERM

"$program" "$data" "$size" || {
	status=$?
	echo "demo: PENSTOCK_DEMO_DIR=/some/folder names another folder for its files" >&2
	exit $status
}
