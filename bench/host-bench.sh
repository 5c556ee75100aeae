#!/bin/sh
# SPDX-License-Identifier: MIT
# What `make bench` runs: reads of a file into host memory, cold and warm, by Penstock and by what
# everybody has: dd, fio, cat. Contenders take turns, round by round, in an order that moves on;
# medians are compared.
#
#   bench/host-bench.sh BUILD [SIZE [ROUNDS]]        default: 2G, 5 rounds
#
# Penstock is measured in a process of its own (bench/host_bench.c): into a small window over and
# over, as the others read, and into memory that keeps the whole file; and by its command line's own
# figure, which has fresh memory each time. dd and fio say their own time; cat is timed from
# outside. PENSTOCK_BENCH_DIR is a folder on the disk to measure (default: one in BUILD, removed
# afterwards); every single value goes to BUILD/host-bench.log.
set -eu

build=$(cd "${1:?usage: bench/host-bench.sh BUILD [SIZE [ROUNDS]]}" && pwd)
size=${2:-2G}
rounds=${3:-5}
data=${PENSTOCK_BENCH_DIR:-$build/bench-data}
log=$build/host-bench.log
file=$data/host-bench.data

made=
[ -d "$data" ] || { mkdir -p "$data" && made=$data; }
work=$(mktemp -d)
# shellcheck disable=SC2317
clean() {
	exec 3>&- 4<&-
	rm -rf "$file" "$work"
	[ -z "$made" ] || rmdir "$made" 2>/dev/null || :
}
trap clean EXIT
trap 'exit 1' HUP INT TERM

"$build/penstock" copy --quiet "pattern:$size" "$file"
bytes=$(stat -c %s "$file")

# Root empties the page cache for everybody; others ask for this file.
make_cold() {
	sync "$file"
	dd if="$file" iflag=nocache count=0 2>/dev/null
	{ echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null || :
}

make_warm() {
	cat "$file" >/dev/null
}

# ------------------------------------------------------------------- contenders: each says GB/s

rate() {
	awk -v bytes="$1" -v seconds="$2" 'BEGIN { printf "%.4f\n", bytes / seconds / 1e9 }'
}

by_dd() {
	LC_ALL=C dd if="$file" of=/dev/null bs="$1" ${2:+"iflag=$2"} 2>"$work/dd"
	rate "$bytes" "$(sed -n 's/.*copied, \([0-9.e-]*\) s.*/\1/p' "$work/dd")"
}

by_fio() {
	engine=$1 direct=$2 depth=$3
	fio --name=read --filename="$file" --rw=read --bs=1M --size="$bytes" --invalidate=0 \
		--ioengine="$engine" --direct="$direct" --iodepth="$depth" --thread \
		--output-format=terse --terse-version=3 >"$work/fio" 2>/dev/null
	rate "$bytes" "$(awk -F';' 'NR == 1 { print $9 / 1000 }' "$work/fio")"
}

by_cat() {
	start=$(date +%s%N)
	cat "$file" >/dev/null
	end=$(date +%s%N)
	rate "$bytes" "$(awk -v t=$((end - start)) 'BEGIN { print t / 1e9 }')"
}

by_penstock() {
	echo "$1" >&3
	read -r answer cpu path <&4 || {
		echo "host-bench: penstock's process has ended" >&2
		exit 1
	}
	[ "$1" = whole ] || echo "$path, $cpu CPU-s" >"$work/path"
	echo "$answer"
}

by_cli() {
	"$build/penstock" copy --json "$file" host: |
		sed -n 's/.*"gb_per_s": *\([0-9.e+-]*\).*/\1/p' | head -n 1
}

# A name for the table, and the command. Those marked * are what the issue asks to be met.
contenders='penstock|by_penstock window
penstock, all of it kept|by_penstock whole
penstock copy (fresh memory)|by_cli
* dd iflag=direct bs=1M|by_dd 1M direct
* dd iflag=direct bs=2M|by_dd 2M direct
* dd iflag=direct bs=4M|by_dd 4M direct
* cat|by_cat
dd bs=1M|by_dd 1M'
if command -v fio >/dev/null; then
	contenders="$contenders
* fio io_uring direct 1M x 8|by_fio io_uring 1 8
* fio io_uring direct 1M x 32|by_fio io_uring 1 32
fio psync direct 1M|by_fio psync 1 1
fio psync cached 1M|by_fio psync 0 1"
else
	echo "there is no fio here; it is left out"
fi
count=$(echo "$contenders" | wc -l)

# ------------------------------------------------------------------------------------- measuring

mkfifo "$work/ask" "$work/answer"
"$build/bench/host_bench" "$file" <"$work/ask" >"$work/answer" &
exec 3>"$work/ask" 4<"$work/answer"
read -r ready <&4 && [ "$ready" = ready ]

: >"$log"
measure() {
	state=$1
	round=0
	while [ $round -lt "$rounds" ]; do
		turn=0
		while [ $turn -lt "$count" ]; do
			line=$(echo "$contenders" | sed -n "$(((turn + round) % count + 1))p")
			make_"$state"
			value=$(${line#*|})
			echo "$state|$((round + 1))|${line%|*}|$value" >>"$log"
			turn=$((turn + 1))
		done
		round=$((round + 1))
	done
	cp "$work/path" "$work/path.$state"
}
measure cold
measure warm

# --------------------------------------------------------------------------------------- telling

# The log's lines of one state: name, median, least, most - best first.
summary() {
	sed -n "s/^$1|[0-9]*|//p" "$log" | sort -t'|' -k1,1 -k2,2g | awk -F'|' '
		function tell() {
			middle = n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2
			if (n) printf "%s|%.3f|%.3f|%.3f\n", name, middle, v[1], v[n]
			n = 0
		}
		$1 != name { tell(); name = $1 }
		{ v[++n] = $2 }
		END { tell() }' | sort -t'|' -k2,2gr
}

for state in cold warm; do
	echo
	echo "$state file of $size into host memory, GB/s"
	printf '  %-34s %8s %8s %8s\n' "" median least most
	summary $state | awk -F'|' '{ printf "  %-34s %8.2f %8.2f %8.2f\n", $1, $2, $3, $4 }'
	echo "  penstock went by $(cat "$work/path.$state")"
done
echo
for state in cold warm; do
	summary $state | awk -F'|' -v state=$state '
		$1 == "penstock" { ours = $2 }
		/^\*/ && $2 > best { best = $2; name = substr($1, 3) }
		END {
			verdict = ours >= best ? "MET" : "MISSED"
			printf "  %s: penstock %.2f, best of the others (*) %.2f, %s: %.2f x, %s\n",
				state, ours, best, name, ours / best, verdict
		}'
done
echo "each value: ${log#"$PWD"/}"
