#!/bin/sh
# SPDX-License-Identifier: MIT
# Installs what Penstock needs on Debian 12 or a relative, and only what is missing:
#   tools/setup.sh build    compiler, meson, libraries
#   tools/setup.sh test     that, and what the tests need; Python packages go into .venv
# Run as root, or with sudo at hand. On a machine that has everything it does nothing.
set -eu
cd "$(dirname "$0")/.."

build="gcc libc6-dev meson ninja-build pkg-config liburing-dev libjansson-dev libxxhash-dev
	libdeflate-dev python3-dev"
test="clang-19 libclang-rt-19-dev g++ python3 python3-venv mandoc strace fio util-linux"

wanted=$build
if [ "${1:-build}" = test ]; then wanted="$build $test"; fi

# `make gpu-test` and `make gpu-bench` bring their libraries along; nothing can be installed there.
if [ -n "${PENSTOCK_DEPS:-}" ]; then exit 0; fi

missing=
if command -v dpkg-query >/dev/null; then
	for package in $wanted; do
		dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
			missing="$missing $package"
	done
else
	for tool in cc meson ninja pkg-config; do
		command -v $tool >/dev/null || missing="$missing $tool"
	done
	if [ -n "$missing" ]; then
		echo "setup: this is no Debian; please install:$missing" >&2
		echo "setup: and the libraries liburing, jansson, xxhash and libdeflate" >&2
		exit 1
	fi
fi

if [ -n "$missing" ]; then
	root=
	if [ "$(id -u)" != 0 ]; then
		root=sudo
		command -v sudo >/dev/null || {
			echo "setup: as root, please run: apt-get install$missing" >&2
			exit 1
		}
	fi
	echo "setup: installing$missing"
	export DEBIAN_FRONTEND=noninteractive
	# Package lists age; a fresh machine has none.
	$root apt-get update -qq
	# shellcheck disable=SC2086
	$root apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

if [ "${1:-build}" = test ]; then
	# The system's own interpreter, so that the packages above are the ones it was made for.
	python=/usr/bin/python3
	[ -x $python ] || python=python3
	if ! cmp -s tests/requirements.txt .venv/installed 2>/dev/null; then
		echo "setup: making .venv"
		rm -rf .venv
		$python -m venv .venv
		.venv/bin/pip install --quiet --disable-pip-version-check -r tests/requirements.txt
		cp tests/requirements.txt .venv/installed
	fi
fi
