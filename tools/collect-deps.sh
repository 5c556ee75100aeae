#!/bin/sh
# SPDX-License-Identifier: MIT
# Collects what Penstock is built from - liburing, jansson, xxhash, libdeflate: headers and
# libraries, amd64 - for a server without network:
#
#   tools/collect-deps.sh deps            here, on a Debian or Ubuntu with network; root not needed
#   make DEPS=deps                        there, with the gcc, meson and ninja such a server has
#
# Debian's packages are downloaded and unpacked, never installed. The libraries, static but for
# jansson, work with any glibc that is not older than this machine's.
set -eu

packages="liburing-dev libjansson-dev libjansson4 libxxhash-dev libdeflate-dev"
headers="liburing.h liburing jansson.h jansson_config.h xxhash.h xxh3.h libdeflate.h"
libraries="liburing.a libxxhash.a libdeflate.a"

if [ $# != 1 ]; then
	echo "usage: tools/collect-deps.sh DIRECTORY" >&2
	exit 2
fi
for tool in apt-get dpkg-deb; do
	command -v $tool >/dev/null || {
		echo "collect-deps: there is no $tool; run this on a Debian or Ubuntu machine" >&2
		exit 1
	}
done
mkdir -p "$1/include" "$1/lib"
target=$(cd "$1" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/deb" "$work/root"
cd "$work/deb"

# The sandbox user of apt could not write into our folder, and would warn about it.
apt="apt-get -qq -o APT::Architecture=amd64 -o APT::Sandbox::User=$(id -un)"
private="-o Dir::State::Lists=$work/lists -o Dir::Cache=$work/cache"

# The system's package lists do, if it has any; else lists of our own, which need no root.
# shellcheck disable=SC2086
if ! $apt download $packages >"$work/log" 2>&1; then
	if ! { $apt $private update && $apt $private download $packages; } >"$work/log" 2>&1; then
		cat "$work/log" >&2
		echo "collect-deps: the packages could not be downloaded; is there a network?" >&2
		exit 1
	fi
fi

for package in *.deb; do
	dpkg-deb -x "$package" "$work/root"
done
for header in $headers; do
	cp -R "$work/root/usr/include/$header" "$target/include/"
done
for library in $libraries; do
	cp "$work/root/usr/lib/x86_64-linux-gnu/$library" "$target/lib/"
done
# Debian's static jansson cannot go into a shared library. Copies, since links do not always travel.
for name in libjansson.so libjansson.so.4; do
	cp -L "$work/root/usr/lib/x86_64-linux-gnu/libjansson.so.4" "$target/lib/$name"
done
rm -f "$target/lib/libjansson.a"

echo "collected into $target ($(du -sh "$target" | cut -f1)):"
for package in *.deb; do
	echo "  ${package%.deb}"
done
