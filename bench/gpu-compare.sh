#!/bin/sh
# SPDX-License-Identifier: MIT
# The whole comparison on a GPU server: `python -m penstock.compare` over a small and a large model,
# with every peer whose wheel was taken along, and at the end the project's targets beside what was
# measured.
#
#   tools/collect-wheels.sh wheels               on a machine with network; take the folder along
#   bench/gpu-compare.sh BUILD [--limit SECONDS] [--only 0.6b|7b|targets] [--torch-7b]
#
# BUILD has penstock and python/ built. --limit (default 540) is for everything; runs that do not
# fit are left out and named. --only runs one model; `targets` prints the last table again from the
# files of earlier runs. --torch-7b adds torch.load for the large model (a minute more, most of it
# spent on saving).
#
# PENSTOCK_WHEELS is the folder of wheels (default: wheels in the source folder), PENSTOCK_BENCH_DIR
# the folder for models (default: one in BUILD, removed afterwards), PENSTOCK_BENCH_OUT the one that
# takes compare.txt (all that is printed), compare-*.json, compare-*.png and compare.log (what the
# loaders print; default: BUILD),
# PENSTOCK_BENCH_DEVICE the device (default: cuda:0).
#
# KvikIO goes through cuFile, which wants to know the disk from /run/udev. Containers lack that
# record; as root it is made here, and removed at the end.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
usage="usage: bench/gpu-compare.sh BUILD [--limit SECONDS] [--only 0.6b|7b|targets] [--torch-7b]"
build=$(cd "${1:?$usage}" && pwd)
shift
limit=540 only= torch_7b=
while [ $# -gt 0 ]; do
	case $1 in
	--limit) limit=${2:?$usage} && shift ;;
	--only) only=${2:?$usage} && shift ;;
	--torch-7b) torch_7b=1 ;;
	*)
		echo "$usage" >&2
		exit 2
		;;
	esac
	shift
done

python=${PYTHON:-python3}
out=${PENSTOCK_BENCH_OUT:-$build}
data=${PENSTOCK_BENCH_DIR:-$build/compare-data}
wheels=${PENSTOCK_WHEELS:-$root/wheels}
device=${PENSTOCK_BENCH_DEVICE:-cuda:0}
started=$(date +%s)
data_made=
# shellcheck source=tools/udev-record.sh
. "$root/tools/udev-record.sh"
export PYTHONPATH="$build/python"

mkdir -p "$out"
if [ "$only" = targets ]; then
	exec "$python" "$root/bench/compare_targets.py" "$out"
fi
[ -d "$data" ] || { mkdir -p "$data" && data_made=$data; }
peers=$data/peers

# shellcheck disable=SC2317
clean() {
	rm -rf "$peers" "$data/torch" "$data/table.txt"
	[ -z "$data_made" ] || rm -rf "$data_made"
	remove_udev_record
}
trap clean EXIT
trap 'exit 1' HUP INT TERM

left() {
	echo $((started + limit - $(date +%s)))
}

describe() {
	asked=name,driver_version,pcie.link.gen.current,pcie.link.width.current
	echo "date       $(date -u +%Y-%m-%dT%H:%MZ)"
	echo "kernel     $(uname -r)"
	model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
	echo "processor  $model, $(nproc) usable"
	echo "memory     $(sed -n 's/^MemTotal: *//p' /proc/meminfo)"
	echo "disk       $(df -PT "$data" | awk 'NR == 2 { print $1 ", " $2 }')"
	echo "GPU        $(nvidia-smi --format=csv,noheader --query-gpu=$asked 2>/dev/null ||
		echo "nvidia-smi does not answer")"
	"$python" -c 'from importlib import metadata as m
for name in ("torch", "transformers", "safetensors", "accelerate"):
    print(f"{name:10} {m.version(name)}")' 2>/dev/null || :
	echo
}

# install FOLDER WHEEL...: each family gets a folder, so that nobody's safetensors is replaced.
install() {
	folder=$peers/$1
	shift
	found=
	for name in "$@"; do
		for wheel in "$wheels/$name"-*.whl; do
			[ ! -e "$wheel" ] || found="$found $wheel"
		done
	done
	[ -n "$found" ] || return 0
	# shellcheck disable=SC2086
	"$python" -m pip install --quiet --no-index --no-deps --no-compile \
		--disable-pip-version-check --root-user-action=ignore --target "$folder" $found ||
		echo "could not be installed: $found"
}

install_peers() {
	install fastsafetensors fastsafetensors
	install instanttensor instanttensor
	install safetensors-prefetch safetensors
	install runai runai_model_streamer humanize
	install kvikio kvikio_cu13 libkvikio_cu13 rapids_logger cuda_pathfinder
	paths=
	for folder in "$peers"/*; do
		[ ! -d "$folder" ] || paths="$paths --path $(basename "$folder")=$folder"
	done
}

# compare NAME SECONDS OPTION...: one model; table on the screen and in a file, values as JSON.
compare() {
	name=$1 seconds=$2
	shift 2
	if [ ! -e "$data/$name/config.json" ]; then
		"$build/penstock" make-model --quiet "$name" "$data/$name"
		sync
		echo "made model $name: $(du -sh "$data/$name" | cut -f1), $(left) s left"
	fi
	status=0
	# cuFile leaves its log where it is started.
	# shellcheck disable=SC2086
	(cd "$data" && exec "$python" -m penstock.compare "$data/$name" --device "$device" --fork \
		$paths --limit "$seconds" --timeout 60 --json "$out/compare-$name.json" \
		--log "$out/compare.log" "$@") >"$data/table.txt" || status=$?
	cat "$data/table.txt"
	echo
	[ $status -lt 2 ] || echo "the comparison for $name ended with status $status"
}

plot() {
	"$python" -c 'import matplotlib' 2>/dev/null && echo "--plot $out/compare-$1.png" || :
}

rm -f "$out/compare.log" "$out/compare.txt"
describe | tee "$out/compare.txt"
rm -rf "$peers"
install_peers
case $(id -u)$device in 0cuda*) make_udev_record "$data" ;; esac

# The rows that matter get three rounds and more; those that take ten seconds get one.
slow="transformers=1,safetensors=1,safetensors-cpu=1,torch*=1,runai=1,penstock-pretrained=1"
if [ "$only" != 7b ]; then
	[ -n "$only" ] && seconds=$(left) || seconds=$((limit * 30 / 100))
	# shellcheck disable=SC2046
	compare 0.6b "$seconds" --rounds "3,penstock=7,$slow" --startup \
		--torch-files "$data/torch" $(plot 0.6b) | tee -a "$out/compare.txt"
	rm -rf "$data/torch"
fi
if [ "$only" != 0.6b ]; then
	few="instanttensor=1,cold:instanttensor-buffered=1,cold:instanttensor-mmap=1,kvikio=2"
	few="$few,cold:safetensors-cpu=0,cold:penstock-pretrained=0,mixed:*=0,mixed:penstock=3"
	few="$few,mixed:fastsafetensors=1,mixed:instanttensor-*=1,mixed:kvikio=1"
	few="$few,mixed:safetensors-prefetch=1"
	[ -n "$torch_7b" ] && torch="--torch-files $data/torch" || torch=
	# shellcheck disable=SC2046,SC2086
	compare 7b "$(left)" \
		--rounds "3,penstock=5,cold:penstock=4,$slow,safetensors-prefetch=2,$few" \
		--mixed --tp 2 $torch $(plot 7b) | tee -a "$out/compare.txt"
fi

"$python" "$root/bench/compare_targets.py" "$out" | tee -a "$out/compare.txt"
echo "values: $out/compare-*.json; what the loaders printed: $out/compare.log; $(left) s left"
