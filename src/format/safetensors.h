/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_SAFETENSORS_H
#define FORMAT_SAFETENSORS_H
/*
 * A safetensors file is 8 bytes that say how long the header is, the header in JSON, and the
 * tensors' bytes. Here the header becomes a table: pure functions over bytes, no I/O.
 *
 * What a table says is true of every file that is accepted:
 *   1. Every tensor has a kind that is known, and as many bytes as its shape and kind need.
 *   2. Tensors lie one after the other, in the order of the table, from the end of the header to
 *      the end of the file, without a hole and without overlap. (Empty ones lie between two.)
 *   3. Names are unique and valid UTF-8.
 */
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

#define SAFETENSORS_HEADER_MAX 100000000u

struct safetensors {
	struct pen_tensor *tensors;	/* by offset, then name; offsets are those of the file */
	const struct pen_tensor **by_name;	/* the same, sorted by name */
	size_t count;
	struct pen_metadata *metadata;	/* in the file's order, keys once; NULL: none, not empty */
	size_t metadata_count;
	uint64_t data;			/* where the tensors begin */
};

/*
 * The length of the header, from the first 8 bytes of a file (fewer only if the file has fewer).
 * `name` is for messages, here and below. Refuses what the file cannot hold.
 */
int safetensors_header_length(const char *name, const unsigned char *first, uint64_t file_size,
			      size_t *length, struct pen_error *err);

/* The table, from the header's bytes and the size of the whole file. Free it with free(). */
int safetensors_parse(const char *name, const void *header, size_t length, uint64_t file_size,
		      struct safetensors **table, struct pen_error *err);

#endif
