/* SPDX-License-Identifier: MIT */
#ifndef BASE_DIGEST_H
#define BASE_DIGEST_H
/* The kinds of digest that a chunk of bytes can have; pure functions over bytes in memory. */
#include <stddef.h>
#include <stdint.h>

/* A kind of digest of a chunk: what it is called, how many bits it has, and the function. */
struct digest_kind {
	const char *name;	/* "xxh3-64", "crc32" */
	unsigned int bits;
	uint64_t (*of)(const void *bytes, size_t length);
};

/* By its public number (enum pen_digest_kind); NULL where there is none. */
const struct digest_kind *digest_kind(int kind);

/* CRC32 of two neighbours from the CRC32s of each: crc32(A||B). */
uint64_t digest_crc32_join(uint64_t first, uint64_t second, uint64_t second_length);

#endif
