/* SPDX-License-Identifier: MIT */
#ifndef BASE_PLANES_CODE_H
#define BASE_PLANES_CODE_H
/*
 * The loops of the coding, compiled once in plain C and once for the vectors of the CPU; both give
 * the same bytes. planes.c chooses, and tests run all that the CPU can.
 */
#include "base/planes.h"

struct planes_code {
	const char *name;
	uint32_t (*checksum)(const void *values, size_t bytes);
	void (*encode)(enum planes_kind kind, const void *values, uint32_t count, void *stored,
		       struct planes_chunk *chunk);
	bool (*decode)(enum planes_kind kind, const void *stored, const struct planes_chunk *chunk,
		       uint32_t count, void *values);
};

extern const struct planes_code planes_code_plain;
/* Where the CPU lacks the instructions, a call of its functions is fatal. */
extern const struct planes_code planes_code_vector;

#define PLANES_CODES 2

/* Those that this CPU can run, the fastest first; returns how many, at least one. */
size_t planes_usable(const struct planes_code *usable[PLANES_CODES]);

#endif
