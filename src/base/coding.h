/* SPDX-License-Identifier: MIT */
#ifndef BASE_CODING_H
#define BASE_CODING_H
/*
 * How the bytes of a coded extent become values in memory. They are chunks (base/planes.h) of one
 * tensor, whole ones; of their values a box is wanted: rows of equal length at equal distances,
 * each number as it is or in another form. A core decodes by decode_run(), a GPU by the kernel that
 * coding_kernel() names; both are told the same (base/decode.h).
 */
#include <stdbool.h>
#include <stdint.h>
#include "base/decode.h"
#include "base/form.h"
#include "base/planes.h"
#include "penstock.h"

struct coding {
	enum planes_kind kind;
	const struct form *form;		/* what the values become; NULL: they stay */
	const struct planes_chunk *chunks;	/* of the tensor, each passed planes_check() */
	const uint64_t *offsets;		/* of each, in the object */
	uint64_t values;			/* of the tensor */
	/* The box, in values; what of it lies at the extent's memory is its first. */
	uint64_t start, length, rows, pitch;
	uint64_t memory_pitch;			/* in bytes */
	/* The words for a chunk that is not what was packed. */
	void (*damaged)(const struct coding *coding, uint64_t chunk, struct pen_error *err);
	const void *context;			/* of who made it */
};

/* Some of a coding's chunks, in a buffer. */
struct coding_part {
	const struct coding *coding;
	uint64_t first, count;		/* chunks of the tensor */
	const unsigned char *stored;	/* the first of them, at a multiple of 16 */
	unsigned char *memory;		/* of the first value of the box */
};

/* The chunk that begins at this offset of the object, or that it lies in. */
uint64_t coding_chunk_at(const struct coding *coding, uint64_t offset);

/* Where a chunk ends in the object. */
uint64_t coding_chunk_end(const struct coding *coding, uint64_t chunk);

/* The values from chunk `first` to before chunk `end` that are in the box, as bytes of memory. */
uint64_t coding_bytes(const struct coding *coding, uint64_t first, uint64_t end);

/* Bytes of a value in memory. */
uint64_t coding_value_size(const struct coding *coding);

/* Bytes from the box's first in memory to its end. */
uint64_t coding_span(const struct coding *coding);

/*
 * What a decoder is to be told of as many chunks of a part, from number `done` on, as fit into one
 * launch; returns how many those are. The verdict and its mark are left to the caller.
 */
uint32_t coding_launch(const struct coding_part *part, uint64_t done,
		       struct decode_launch *launch);

/* The kernels of kernels/decode.cu, and what each makes of what. */
#define CODING_KERNELS 11u
struct coding_kernel {
	const char *name;
	enum planes_kind kind;
	uint64_t form;			/* enum pen_form */
};
extern const struct coding_kernel coding_kernels[CODING_KERNELS];

/* The number of the one for a coding. */
unsigned int coding_kernel(const struct coding *coding);

/* The twin of the kernels. */
void decode_run(const struct decode_launch *launch, enum planes_kind kind,
		const struct form *form);

#endif
