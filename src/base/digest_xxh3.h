/* SPDX-License-Identifier: MIT */
#ifndef BASE_DIGEST_XXH3_H
#define BASE_DIGEST_XXH3_H
/*
 * XXH3 of 64 bits, compiled once for each width of vectors. The library of a distribution is built
 * for the oldest CPU it supports, which leaves a new one at a quarter of its speed.
 */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t digest_xxh3_function(const void *bytes, size_t length);

/* meson.build has the flags for each. Where the CPU lacks the instructions, the call is fatal. */
digest_xxh3_function digest_xxh3_baseline;
#ifdef __x86_64__
digest_xxh3_function digest_xxh3_avx2;
digest_xxh3_function digest_xxh3_avx512;
#endif

#define DIGEST_XXH3_MAX 3

/* Those that this CPU can run, the fastest first; returns how many, at least one. */
size_t digest_xxh3_usable(digest_xxh3_function *usable[DIGEST_XXH3_MAX]);

#endif
