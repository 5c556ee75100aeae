#!/bin/sh
# SPDX-License-Identifier: MIT
# What `make gpu-test` runs: the suites on a real GPU, with nothing but a shell.
#
#   tools/gpu-test.sh BUILD
#
# - the conform programs and tests/gpu, as built in BUILD
# - tests/gpu/*.py where there is a python3; they skip themselves where torch is absent
# - tests/python, the suite of the Python package, where there is a pytest
# - round trips by the command line, both directions, every transfer type, bytes compared
#
# The cuFile types (0, 5, 6, 7) need a record of the disk in /run/udev, which containers lack. With
# PENSTOCK_GPU_TEST_UDEV=1 (as root) that record is made and removed again; without it those types
# skip where cuFile refuses the file. PENSTOCK_GPU_TEST_DIR is the folder for files (default: one
# in BUILD), PENSTOCK_GPU_TEST_LARGE the size of the large file (default: 5G, sparse).
#
# The last line counts: N passed, N failed, N skipped. The status is 0 if none failed.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
build=$(cd "${1:?usage: tools/gpu-test.sh BUILD}" && pwd)
penstock=$build/penstock
large=${PENSTOCK_GPU_TEST_LARGE:-5G}
passed=0 failed=0 skipped=0
# shellcheck source=tools/udev-record.sh
. "$root/tools/udev-record.sh"

data=${PENSTOCK_GPU_TEST_DIR:-$build}/gpu-test-data.$$
mkdir -p "$data"
# shellcheck disable=SC2317
clean() {
	rm -rf "$data"
	remove_udev_record
}
trap clean EXIT
trap 'exit 1' HUP INT TERM
# cuFile leaves its log where it is started.
cd "$data"

pass() {
	passed=$((passed + 1))
	echo "pass  $1"
}

fail() {
	failed=$((failed + 1))
	echo "FAIL  $1"
	sed 's/^/      /' out.txt
}

skip() {
	skipped=$((skipped + 1))
	echo "skip  $1: $2"
}

end() {
	echo "$passed passed, $failed failed, $skipped skipped"
	[ "$failed" = 0 ]
	exit
}

# A command that must succeed; its output is shown if it does not.
ok() {
	name=$1
	shift
	if "$@" >out.txt 2>&1; then pass "$name"; else fail "$name"; fi
}

# A command that must fail with words and without a crash; $2 is what the words contain.
refused() {
	name=$1 words=$2
	shift 2
	status=0
	"$@" >out.txt 2>&1 || status=$?
	if [ $status -gt 0 ] && [ $status -lt 126 ] && grep -q -- "$words" out.txt; then
		pass "$name"
	else
		echo "(status $status, wanted words: $words)" >>out.txt
		fail "$name"
	fi
}

# A test program in C: every case in a process of its own; 77 is a skip, with the reason printed.
program() {
	label=$1 run=$2
	if [ ! -x "$run" ]; then
		skip "$label" "$run is not built"
		return
	fi
	for case in $("$run" --list); do
		status=0
		"$run" "$case" >out.txt 2>&1 || status=$?
		case $status in
		0) pass "$label: $case" ;;
		77) skip "$label: $case" "$(sed -n 's/^skipped: //p' out.txt | head -n 1)" ;;
		*) fail "$label: $case" ;;
		esac
	done
}

script() {
	label=$1 file=$2 status=0
	PENSTOCK_LIBRARY=$build/libpenstock.so python3 "$file" >out.txt 2>&1 || status=$?
	case $status in
	0) pass "$label" ;;
	77) skip "$label" "$(sed -n 's/^skipped: //p' out.txt | head -n 1)" ;;
	*) fail "$label" ;;
	esac
}

# The bytes of SIZE go from the GPU to a file and back by one type, compared each way.
round_trip() {
	type=$1 size=$2
	name="GPU -> file -> GPU, $type, $size bytes"
	if "$penstock" copy --quiet --verify -t "$type" --size "$size" cuda:0 trip.bin \
		>out.txt 2>&1 &&
	   "$penstock" copy --quiet --verify -t "$type" trip.bin cuda:0 >>out.txt 2>&1 &&
	   "$penstock" copy --quiet trip.bin "pattern:$size" >>out.txt 2>&1; then
		pass "$name"
	elif grep -q "use transfer type" out.txt && [ -z "$udev_record" ]; then
		skip "$name" "$(head -n 1 out.txt)"
	else
		fail "$name"
	fi
	rm -f trip.bin
}

# Does the report of the last command (JSON in out.txt) name this path?
took() {
	grep -q "\"path\": *\"$1\"" out.txt
}

# ------------------------------------------------------------------------------ is there a GPU?

if ! "$penstock" copy --quiet --verify pattern:1M cuda:0 >out.txt 2>&1; then
	if grep -Eq 'libcuda|no CUDA-capable|nvidia-smi|no GPU' out.txt; then
		skip "all" "$(head -n 1 out.txt)"
		end
	fi
	fail "the first bytes reach the GPU"
	end
fi
pass "the first bytes reach the GPU"

# ------------------------------------------------------------------------------- the udev record

if [ "${PENSTOCK_GPU_TEST_UDEV:-0}" = 1 ]; then make_udev_record "$data"; fi

# ------------------------------------------------------------------------------------ programs

for part in conform places digests stores; do
	program $part "$build/tests/conform_test_$part"
done
program digest "$build/tests/unit_test_digest"
program gpu "$build/tests/gpu_test_gpu"
program forms "$build/tests/gpu_test_forms"
program decode "$build/tests/gpu_test_decode"
if command -v python3 >/dev/null; then
	for file in "$root"/tests/gpu/check_*.py; do
		[ -e "$file" ] || continue
		script "gpu: $(basename "$file" .py)" "$file"
	done
else
	skip "gpu: Python" "there is no python3"
fi

# ----------------------------------------------------------------------------- Python package

# The suite counts for itself; its closing line is "N passed, N failed, N skipped".
if [ ! -d "$build/python/penstock" ]; then
	skip "python" "the package is not built; are the headers of Python there?"
elif ! python3 -c 'import pytest' 2>/dev/null; then
	skip "python" "there is no pytest"
else
	PENSTOCK_PYTHON=$build/python python3 -m pytest -q -p no:cacheprovider -rs \
		--basetemp="$data/pytest" "$root/tests/python" >out.txt 2>&1 || :
	counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' out.txt | tail -n 1)
	if [ -z "$counts" ]; then
		fail "python: the suite came to no end"
	else
		# shellcheck disable=SC2086
		set -- $counts
		passed=$((passed + $1)) failed=$((failed + $3)) skipped=$((skipped + $5))
		grep -E '^(FAILED|ERROR|SKIPPED)' out.txt || :
		if [ "$3" -gt 0 ]; then sed 's/^/      /' out.txt; fi
		echo "python: $counts"
	fi
fi

# --------------------------------------------------------------------------------- command line

for size in 0 1 511 4096 4097 1048575 67108987; do
	round_trip auto $size
done
for type in 2 3 4; do
	round_trip $type 4097
	round_trip $type 67108987
done
for type in 0 5 6 7; do
	round_trip $type 1048576
	round_trip $type 67108987
done

"$penstock" copy --quiet pattern:256M file.bin

# cuFile without GPUDirect Storage is called by its name.
if "$penstock" copy --json --verify -t 0 file.bin cuda:0 >out.txt 2>&1; then
	if took gds || took cufile-compat; then
		pass "cuFile's path is named gds or cufile-compat"
	else
		fail "cuFile's path is named gds or cufile-compat"
	fi
else
	skip "cuFile's path is named gds or cufile-compat" "$(grep -v '^[{ }]' out.txt | head -n 1)"
fi
refused "the host's own type is refused for a GPU" "nearest" \
	"$penstock" copy --quiet -t 1 file.bin cuda:0

cat file.bin >/dev/null
ok "a warm file, auto" "$penstock" copy --json --verify file.bin cuda:0
ok "a warm file, mapped" "$penstock" copy --json --verify -t mapped file.bin cuda:0
ok "a warm file, one lane" "$penstock" copy --json --verify --lanes 1 file.bin cuda:0

# Half of the file out of the page cache: both ways in one job.
sync file.bin
dd if=file.bin of=/dev/null bs=1M count=128 iflag=nocache 2>/dev/null
if "$penstock" copy --json --verify file.bin cuda:0 >out.txt 2>&1 && took 'direct-[a-z]*' &&
   { took cached || took mapped; }; then
	pass "half cached: both ways in one job"
else
	fail "half cached: both ways in one job"
fi
dd if=file.bin iflag=nocache count=0 2>/dev/null
ok "a cold file, auto" "$penstock" copy --json --verify file.bin cuda:0
ok "within 4 MiB of pinned memory" \
	"$penstock" copy --json --verify --memory-limit 4M file.bin cuda:0
ok "an offset aligned to nothing" \
	"$penstock" copy --json --verify --offset 4099 --size 100000001 file.bin cuda:0
ok "injected short reads and delays" \
	"$penstock" copy --json --verify --inject short:5%,delay:1%:5ms file.bin cuda:0
ok "explain with a GPU" "$penstock" explain file.bin --device cuda:0

refused "a GPU that is not there" "cuda:99" "$penstock" copy --quiet file.bin cuda:99
refused "more than a GPU holds" "cuda:0" "$penstock" copy --quiet --size 64T cuda:0 null:
refused "an I/O error in mid-flight" "file.bin" \
	"$penstock" copy --quiet --inject fail:20%:ENXIO file.bin cuda:0

truncate -s "$large" large.bin
ok "a sparse file of $large" "$penstock" copy --json --verify large.bin cuda:0
rm -f large.bin

# Ctrl-C in the middle: ends soon, with the shell's status for it. (A job of ours in the background
# would ignore the signal, as POSIX has it; timeout does not.)
name="SIGINT in the middle of a copy from the GPU"
status=0
timeout --preserve-status -k 20 -s INT 2 \
	"$penstock" copy --quiet --size 64M cuda:0 "pattern:64M,rate=4M" >out.txt 2>&1 || status=$?
if [ $status = 130 ]; then
	pass "$name"
else
	echo "(status $status, wanted 130)" >>out.txt
	fail "$name"
fi
end
