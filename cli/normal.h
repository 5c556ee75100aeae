/* SPDX-License-Identifier: MIT */
#ifndef CLI_NORMAL_H
#define CLI_NORMAL_H
/*
 * Made-up weights: numbers of a normal distribution around 0 with a deviation of 0.02, as a fresh
 * model has them. Each 8 bytes are a function of a key and their own place, so any part can be
 * made by any thread in any order and is always the same.
 */
#include <stddef.h>
#include <stdint.h>

enum normal_kind {
	NORMAL_BF16,	/* numbers of 16 bits */
	NORMAL_F32,	/* the same with 16 bits more behind */
	NORMAL_BOOL,	/* bytes of 0 and 1 */
	NORMAL_BITS,	/* any bits: for all other types */
};

/* Once, before the first use. */
void normal_init(void);

/* The key of a stream of numbers: one for each name and seed. */
uint64_t normal_key(const char *name, uint64_t seed);

/* Write `length` bytes of the stream, from its byte `offset` on. */
void normal_fill(enum normal_kind kind, uint64_t key, uint64_t offset, void *bytes, size_t length);

#endif
