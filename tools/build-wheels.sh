#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds the wheel for this machine's processor, one for every Python from 3.11 on, that runs on any
# glibc from 2.28 on (2018) and brings its libraries along:
#   tools/build-wheels.sh [FOLDER]        wheels go to FOLDER, dist otherwise
#
# The compiler is zig's clang, which knows the symbols of every glibc; liburing, jansson, xxhash and
# libdeflate are Debian's static ones, and their licences go into the wheel beside ours. auditwheel
# says whether the result keeps what its name promises; then it is installed into an empty
# environment and used.
set -eu
cd "$(dirname "$0")/.."

glibc=2.28
libraries="uring jansson xxhash deflate"
packages="liburing-dev libjansson-dev libxxhash-dev libdeflate-dev"
headers="liburing.h liburing jansson.h jansson_config.h xxhash.h xxh3.h libdeflate.h"

out=${1:-dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

tools/setup.sh build
machine=$(uname -m)
python=/usr/bin/python3
[ -x $python ] || python=python3

echo "build-wheels: collecting tools and libraries"
$python -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check -r tools/wheel-requirements.txt
PATH=$work/tools/bin:$PATH
mkdir -p "$work/deps/include" "$work/deps/lib" "$work/licences"
for name in $headers; do
	cp -R "/usr/include/$name" "$work/deps/include/"
done
for name in $libraries; do
	cp "/usr/lib/$machine-linux-gnu/lib$name.a" "$work/deps/lib/"
done
for name in $packages; do
	cp "/usr/share/doc/$name/copyright" "$work/licences/$name.txt"
done

# Python's headers are Debian's, behind those of the old glibc that zig brings.
cat >"$work/cc" <<EOF
#!/bin/sh
exec "$work/tools/bin/python" -m ziglang cc -target $machine-linux-gnu.$glibc "\$@" \
	-idirafter /usr/include
EOF
chmod +x "$work/cc"

echo "build-wheels: building for glibc $glibc on $machine"
CC=$work/cc python -m build --wheel --no-isolation --outdir "$work/raw" \
	-Csetup-args=-Ddeps="$work/deps" . >"$work/log" 2>&1 || {
	cat "$work/log" >&2
	exit 1
}

# The licences of what is inside, where a wheel has its own; then the check, which also gives the
# wheel its name.
python -m wheel unpack --dest "$work/unpacked" "$work"/raw/*.whl >/dev/null
cp "$work"/licences/*.txt "$work"/unpacked/*/*.dist-info/licenses/
python -m wheel pack --dest-dir "$work" "$work"/unpacked/* >/dev/null
auditwheel repair --plat "manylinux_$(echo $glibc | tr . _)_$machine" --wheel-dir "$work/done" \
	"$work"/penstock-*.whl >"$work/log" 2>&1 || {
	cat "$work/log" >&2
	exit 1
}
auditwheel show "$work"/done/*.whl

echo "build-wheels: trying it in an empty environment"
$python -m venv "$work/empty"
"$work/empty/bin/pip" install --quiet --disable-pip-version-check --no-index "$work"/done/*.whl
(
	cd "$work"
	unset PYTHONPATH LD_LIBRARY_PATH
	empty/bin/penstock --version
	empty/bin/penstock make-model layers=1 model --quiet
	empty/bin/penstock load --device host model
	empty/bin/penstock copy --verify pattern:64M file
	empty/bin/python -c '
import penstock
buffer = bytearray(64 << 20)
with penstock.File("file") as file:
    file.read(buffer)
assert buffer[8:16] == (8).to_bytes(8, "little"), "wrong bytes"
print(f"penstock {penstock.__version__}: {penstock.last_report()}")'
)
cp "$work"/done/*.whl "$out/"
echo "built $(ls "$work/done") in $out"
