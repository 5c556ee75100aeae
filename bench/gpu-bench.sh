#!/bin/sh
# SPDX-License-Identifier: MIT
# What `make gpu-bench` runs: gpu_bench (see gpu_bench.c), with the machine described above it.
#
#   bench/gpu-bench.sh BUILD [options of gpu_bench: --quick, --dir DIR, --size, --only ...]
#
# PENSTOCK_BENCH_DIR is a folder on the disk to measure (default: one in BUILD, removed afterwards),
# PENSTOCK_BENCH_OUT the folder that takes gpu-bench.log and gpu-bench.json (default: BUILD).
set -eu

build=$(cd "${1:?usage: bench/gpu-bench.sh BUILD [options]}" && pwd)
shift
out=${PENSTOCK_BENCH_OUT:-$build}
data=${PENSTOCK_BENCH_DIR:-$build/bench-data}
log=$out/gpu-bench.log

mkdir -p "$out"
made=
if [ ! -d "$data" ]; then
	mkdir -p "$data"
	made=$data
fi
# shellcheck disable=SC2317
clean() {
	rm -f "$data/penstock-bench.data" "$data/penstock-bench.out"
	[ -z "$made" ] || rmdir "$made" 2>/dev/null || :
}
trap clean EXIT
trap 'exit 1' HUP INT TERM

describe() {
	model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
	huge=$(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null || echo unknown)
	gpu=$(nvidia-smi --format=csv,noheader --query-gpu="$asked" 2>/dev/null) ||
		gpu="nvidia-smi does not answer"
	echo "date       $(date -u +%Y-%m-%dT%H:%MZ)"
	echo "kernel     $(uname -r)"
	echo "processor  $model, $(nproc) usable"
	echo "memory     $(sed -n 's/^MemTotal: *//p' /proc/meminfo), huge pages $huge"
	echo "disk       $(df -PT "$data" | awk 'NR == 2 { print $1 ", " $2 }')"
	echo "GPU        $gpu"
	echo "command    gpu_bench $*"
	echo
}
asked=name,driver_version,pcie.link.gen.current,pcie.link.width.current

describe "$@" | tee "$log"
"$build/bench/gpu_bench" --dir "$data" --log "$log" --json "$out/gpu-bench.json" "$@"
echo "each round: $log; all values: $out/gpu-bench.json"
