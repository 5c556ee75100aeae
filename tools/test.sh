#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds everything three times - plain, address and undefined-behaviour sanitizers, thread
# sanitizer - with warnings as errors, and runs all tests, as many at a time as there are cores.
#   tools/test.sh [ARGUMENTS]            arguments go to pytest
#   tools/test.sh --quick [ARGUMENTS]    the plain build, without what is slow or measures
set -eu
cd "$(dirname "$0")/.."

quick=
if [ "${1:-}" = --quick ]; then
	quick=yes
	shift
fi

configure() {
	directory=$1
	shift
	[ -f "$directory/build.ninja" ] || "$@" meson setup "$directory" -Dwerror=true \
		$options >"$directory.log" 2>&1 || {
		cat "$directory.log"
		exit 1
	}
	rm -f "$directory.log"
	ninja -C "$directory" --quiet
}

# Handed out one by one: a core that was given a long row of tests at once would end alone.
test_with() {
	exec .venv/bin/python -m pytest -q -p no:cacheprovider -n "$(nproc)" --maxschedchunk 1 "$@"
}

options= configure build env CC="${CC:-gcc}"
if [ -n "$quick" ]; then
	PENSTOCK_TEST_BUILDS=plain
	export PENSTOCK_TEST_BUILDS
	test_with -m "not slow and not alone" tests "$@"
fi
# Sanitizers come with clang, which also gives the code a second compiler's eye; on ARM those before
# 15 take three seconds to look for leaks. An interpreter that is not sanitized cannot load what is,
# so Python is left out. What drivers call their structures is their own: function types differ.
alike="-Db_lundef=false -Dpython=disabled -Dc_args=-fno-sanitize=function"
options="-Db_sanitize=address,undefined $alike" configure build-asan env CC=clang-19
options="-Db_sanitize=thread $alike" configure build-tsan env CC=clang-19

test_with tests "$@"
