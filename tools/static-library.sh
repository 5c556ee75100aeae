#!/bin/sh
# SPDX-License-Identifier: MIT
# Makes the static library out of the archive that holds everything: one object in which only the
# names of the header can be seen. An archive has no other way to keep its inside to itself, and a
# program may well have an error_set() or a plan_free() of its own.
#   tools/static-library.sh ARCHIVE LIBRARY OBJECT COMPILER...
set -eu
archive=$1 library=$2 object=$3
shift 3
mkdir -p "$(dirname "$object")"

"$@" -r -nostdlib -o "$object" -Wl,--whole-archive "$archive"
"${OBJCOPY:-objcopy}" --localize-hidden "$object"
rm -f "$library"
"${AR:-ar}" rcs "$library" "$object"
