/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_CODED_H
#define FORMAT_CODED_H
/*
 * A coded file (docs/coded.md): what it says of itself, checked, as tables. base/planes.h has the
 * chunks. Reading begins with a safetensors table like any other, which is looked at for the mark.
 *
 * What a struct coded says is true of every file that is accepted:
 *   1. The original header is one that safetensors_parse() accepts, and its tensors are those of
 *      the file, each coded or as it was.
 *   2. Coded tensors begin at multiples of 16, and have as many chunks as their values need.
 * And of a struct coded_chunks: every chunk passes planes_check() and lies in its tensor's bytes.
 */
#include <stddef.h>
#include <stdint.h>
#include "base/planes.h"
#include "format/safetensors.h"
#include "penstock.h"

#define CODED_VERSION "1"
#define CODED_TABLE "__penstock__"
#define CODED_MARK "penstock."		/* what keys of metadata begin with */
#define CODED_KEY_VERSION CODED_MARK "coded"
#define CODED_KEY_HEADER CODED_MARK "header"
#define CODED_KEY_BYTES CODED_MARK "bytes"
#define CODED_KEY_CRC32 CODED_MARK "crc32"
#define CODED_DATA_ALIGN 4096u
/* Tensors of fewer values stay as they are: what they could save is less than a page. */
#define CODED_VALUES_LEAST 4096u

struct coded_tensor {
	enum planes_kind kind;	/* PLANES_NONE: it lies as it was */
	uint64_t values;
	uint64_t first;		/* number of its first chunk in the table */
	uint64_t original;	/* where its bytes were in the original file */
};

struct coded {
	struct safetensors *stored;	/* the file as any tool sees it */
	/* The tensors as they were, sorted by where they lie in this file: offsets are those here,
	 * `bytes` are those of the values, `coded` those that it has here. */
	struct safetensors *table;
	struct coded_tensor *tensors;	/* one for each of table->tensors, in their order */
	size_t *order;			/* numbers of these, as they lay in the original file */
	const char *header;		/* of the original file */
	size_t header_length;
	uint64_t bytes;			/* of the original file */
	uint32_t crc32;			/* likewise */
	uint64_t chunks_at, chunk_count;	/* where the table of chunks is, and its length */
};

/* The kind of an enum pen_dtype; PLANES_NONE: never coded. */
enum planes_kind coded_kind(int dtype);

/*
 * If the file has the mark, all that its header says; NULL in `coded` if it has not. `stored`
 * belongs to the struct coded from then on; after an error, and without a mark, to the caller.
 */
int coded_read(const char *name, struct safetensors *stored, struct coded **coded,
	       struct pen_error *err);
void coded_free(struct coded *coded);	/* NULL is allowed */

/* The table of chunks of a file, and where each begins in it. */
struct coded_chunks {
	struct planes_chunk *chunks;
	uint64_t *offsets;
};

/*
 * Read and check the chunks of `count` tensors from number `tensor` on, and set where they begin;
 * others are left alone. The arrays are made for the whole file at the first call.
 */
int coded_chunks_read(const struct coded *coded, struct pen_object *object, size_t tensor,
		      size_t count, struct coded_chunks *chunks, struct pen_error *err);
void coded_chunks_fini(struct coded_chunks *chunks);

/* The second half of it, for one coded tensor: what lies in chunks->chunks is checked. */
int coded_chunks_check(const struct coded *coded, const char *name, size_t number,
		       struct coded_chunks *chunks, struct pen_error *err);

/* The words for a chunk whose checksum differs; returns -EBADMSG. */
int coded_damaged(const char *name, const struct pen_tensor *tensor, uint64_t number,
		  uint64_t offset, struct pen_error *err);

#endif
