/* SPDX-License-Identifier: MIT */
/*
 * One of the functions of digest_xxh3.h: meson.build compiles this file several times, with the
 * name and the vector instructions of each. Everything that the header of xxhash brings is static
 * here, so that no code for a newer CPU can stand in for another object's.
 */
#define XXH_INLINE_ALL
#include <xxhash.h>
#include "base/digest_xxh3.h"

uint64_t DIGEST_XXH3_NAME(const void *bytes, size_t length)
{
	return XXH3_64bits(bytes, length);
}
