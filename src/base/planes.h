/* SPDX-License-Identifier: MIT */
#ifndef BASE_PLANES_H
#define BASE_PLANES_H
/*
 * The lossless coding of numbers whose exponents are few: docs/coded.md has every bit of it. Here
 * are chunks, pure functions over bytes in memory; format/coded.h knows files of them.
 *
 * A decoder's bounds come from a struct planes_chunk that planes_check() has passed, never from
 * the coded bytes: those may be anything, and may change while they are read.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PLANES_CHUNK 16384u	/* values of a chunk; the last one of a tensor may have fewer */
#define PLANES_ALIGN 16u	/* of chunks and their parts, in bytes */
#define PLANES_SYMBOLS 13	/* that have a code: 3 in plane A, 3 in B, 7 in C */
#define PLANES_RESTS 3		/* planes of the rest, at most */

/* What a chunk is, as the table of a file has it: 16 bytes, little endian. */
struct planes_chunk {
	uint32_t checksum;	/* of the values as they were */
	uint16_t escapes[3];	/* from planes A, B and C */
	uint16_t coded;		/* enum planes_how */
	uint32_t bytes;		/* as it is stored, a multiple of PLANES_ALIGN */
};

enum planes_how {
	PLANES_PLAIN,
	PLANES_CODED,
};

/* The kinds of numbers that can be coded. */
enum planes_kind {
	PLANES_NONE,		/* never coded */
	PLANES_BF16,
	PLANES_F32,
	PLANES_F16,
	PLANES_E4M3,
	PLANES_E5M2,
	PLANES_KINDS,
};

/* How wide a value is, where its symbol lies and how many bits are the rest. */
struct planes_shape {
	unsigned int bytes;	/* of a value */
	unsigned int mantissa;	/* bits below the symbol */
	unsigned int symbol;	/* bits of the symbol; one more, the sign, is above it */
};

extern const struct planes_shape planes_shapes[PLANES_KINDS];

/*
 * Where the parts of a coded chunk begin, in bytes from its own begin, and what it has in all. All
 * from the number of values and of escapes: a GPU's warp gets these numbers and needs no others.
 */
struct planes_parts {
	uint32_t rest[PLANES_RESTS];	/* planes of the rest, lowest bits first */
	uint32_t a, b, c, d;
	uint32_t end;
};

/* Chunks that so many values need, and values of one of these. */
static inline uint64_t planes_chunk_count(uint64_t values)
{
	return values / PLANES_CHUNK + (values % PLANES_CHUNK != 0);
}

static inline uint32_t planes_chunk_values(uint64_t values, uint64_t number)
{
	uint64_t left = values - number * PLANES_CHUNK;

	return left < PLANES_CHUNK ? (uint32_t)left : PLANES_CHUNK;
}

/* The widths of the planes of the rest, the widest first; 0 after the last. */
void planes_widths(enum planes_kind kind, unsigned int widths[PLANES_RESTS]);

void planes_parts(enum planes_kind kind, uint32_t values, const uint16_t escapes[3],
		  struct planes_parts *parts);

/* Bytes that a chunk has if it is kept plain. */
uint32_t planes_plain(enum planes_kind kind, uint32_t values);

/* Does what the table says of a chunk of so many values hold together? */
bool planes_check(enum planes_kind kind, uint32_t values, const struct planes_chunk *chunk);

/* The checksum of values, as they are. */
uint32_t planes_checksum(const void *values, size_t bytes);

/* Most bytes that a chunk can be stored in. */
#define PLANES_ROOM (PLANES_CHUNK * 4)

/*
 * Code up to PLANES_CHUNK values: the smaller of both ways, so planes_plain() bytes are room enough
 * at `stored`.
 */
void planes_encode(enum planes_kind kind, const void *values, uint32_t count, void *stored,
		   struct planes_chunk *chunk);

/*
 * Decode `count` values from the chunk.bytes at `stored`; the chunk has passed planes_check().
 * False: the checksum differs, and the values mean nothing. Reads and writes nothing else.
 */
bool planes_decode(enum planes_kind kind, const void *stored, const struct planes_chunk *chunk,
		   uint32_t count, void *values);

#endif
