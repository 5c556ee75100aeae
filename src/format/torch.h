/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_TORCH_H
#define FORMAT_TORCH_H
/*
 * A file of torch's, open for reading: the records of its zip, by offset, and what is known about
 * them. The layout of what Penstock adds - the table of digests - is in docs/torch-file.md.
 *
 * Invariants
 *   1. Records lie in the file, in the order of offsets, and do not overlap (zip.h).
 *   2. Every tensor lies in its record.
 */
#include <stdbool.h>
#include "format/pickle.h"
#include "format/zip.h"
#include "penstock.h"

#define TORCH_STORAGE "data/"			/* what names of storages begin with */
#define TORCH_TABLE ".penstock/digests"
#define TORCH_TABLE_MAX (1u << 30)		/* bytes of one that is read */
#define TORCH_CHUNK (512u << 10)			/* of the digests that are written */

struct pen_torch {
	char *path;
	struct pen_object *object;
	bool borrowed;				/* the object is the caller's */
	uint64_t base, size;			/* the zip's bytes in the object */
	struct zip *zip;			/* offsets are from `base` on */
	struct pen_torch_record *records;	/* offsets are the object's */
	const struct pen_torch_record **by_name;
	size_t record_count;
	struct pickle pickle;			/* empty until tensors are asked for */
	struct pen_torch_tensor *tensors;
	bool has_tensors;
};

/* Is it a storage's record? */
bool torch_is_storage(const struct pen_torch_record *record);

/* --------------------------------------------------------------------- digests of records -- */

/*
 * The table of digests: a head, and one number for each chunk of each storage, in their order. It
 * belongs to a file as long as the storages lie where they lay when it was written.
 */
struct torch_table {
	uint64_t chunk;
	uint64_t places;	/* torch_places() of all storages */
	uint64_t count;
};

#define TORCH_TABLE_HEAD 40u	/* bytes of the head; then 8 for each number */

void torch_table_put(unsigned char to[TORCH_TABLE_HEAD], const struct torch_table *table);

/* What vouches for the places of storages: fed with each one's offset and size in turn, from 0. */
uint64_t torch_places(uint64_t before, uint64_t offset, uint64_t bytes);

/* Chunks that a storage has bytes in. */
uint64_t torch_chunks(uint64_t chunk, uint64_t offset, uint64_t bytes);

/* The chunk, of at most `most` bytes, that fits into requests of a job with these options. */
uint64_t torch_chunk(const struct pen_options *options, uint64_t most);

/* Where records begin and end: `room` cuts, and tables for all chunks before `end`. */
int torch_digests_init(struct pen_digests *digests, struct pen_object *object, uint64_t chunk,
		       uint64_t end, size_t room);
void torch_digests_fini(struct pen_digests *digests);

/* A record, in the order of offsets: its first chunk's digest. */
void torch_digests_cut(struct pen_digests *digests, uint64_t offset, uint64_t bytes);
uint64_t torch_digests_first(const struct pen_digests *digests, uint64_t offset);

#endif
