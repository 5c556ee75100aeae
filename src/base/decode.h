/* SPDX-License-Identifier: MIT */
#ifndef BASE_DECODE_H
#define BASE_DECODE_H
/*
 * What a decoder of chunks is told: kernels/decode.cu by the arguments of its launch, its twin for
 * cores, decode_run(), by a pointer. Both read this header, so it includes nothing.
 *
 * The chunks are told by value. They were read and checked by the host, and no bound of what is
 * read or written comes from anywhere else: the coded bytes may be anything.
 */

/* Chunks of one launch: with these its arguments fill the 4 KiB that every driver takes. */
#define DECODE_CHUNKS 240u

struct decode_chunk {
	unsigned int at;		/* from launch.from on, a multiple of 16 */
	unsigned int checksum;
	unsigned short escapes[3];
	unsigned short coded;		/* enum planes_how */
};

/*
 * Neighbouring chunks of one tensor, and what of their values is wanted: `rows` rows of `length`
 * values, `pitch` values from one to the next. Values are counted from the first that is wanted, so
 * that the chunks may begin before it, with a number below 0.
 */
struct decode_launch {
	unsigned char *to;		/* where that value goes; as its size wants it */
	const unsigned char *from;	/* the first chunk, at a multiple of 16 */
	unsigned int *verdict;		/* gets mark + number + 1 of a chunk that is damaged */
	unsigned int mark;
	unsigned int count;		/* chunks */
	unsigned int values;		/* of all of them; only the last may have fewer */
	unsigned int unused;
	long long first;		/* the number of their first value */
	long long length, rows, pitch;
	long long memory_pitch;		/* in bytes */
	struct decode_chunk chunks[DECODE_CHUNKS];
};

#endif
