/* SPDX-License-Identifier: MIT */
#ifndef CLI_COMPARE_H
#define CLI_COMPARE_H
/*
 * After a copy: take both sides again by the plainest means there are - buffered reads of a file,
 * synchronous copies of memory, the pattern computed anew - and compare. None of it passes
 * through the engine's paths, so an error there cannot hide itself.
 */
#include <stdint.h>
#include "base/hash.h"
#include "penstock.h"
#include "progress.h"
#include "side.h"

/* Bytes to compare: those of `side` from `offset` on. */
struct compare_side {
	const struct side *side;
	uint64_t offset;
	struct pen_device *device;	/* of SIDE_MEMORY, with the address */
	const unsigned char *memory;
};

/*
 * Compare `length` bytes, `chunk` of each side at a time, and give their XXH3-128. A difference is
 * -EILSEQ with the first offset that has one. With `drop`, files leave nothing in the page cache.
 * -ECANCELED after a signal.
 */
int compare_sides(const struct compare_side *from, const struct compare_side *to, uint64_t length,
		  size_t chunk, bool drop, struct progress *progress, char hash[HASH_TEXT_SIZE],
		  struct pen_error *err);

#endif
