/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_PACK_H
#define FORMAT_PACK_H
/*
 * Packing for who has no file yet: pack.c codes what a function reads. pen_pack_start() reads a
 * file; a save that is to be coded reads memory (save_coded.c), and so both write the same bytes.
 */
#include "format/coded.h"
#include "penstock.h"

enum pack_direction {
	PACK,
	UNPACK,
};

/* A file to be read, and what it becomes. All of it lives until the end. */
struct pack_file {
	const char *doing, *name;	/* for messages: "pack", and what */
	uint64_t size;
	const struct safetensors *table;
	const struct coded *coded;	/* NULL: it is not coded; else `source` is an object */
	struct pen_object *to;		/* NULL: nothing is written, what is unpacked is checked */

	/* Bytes of the file, to plain memory. Several threads at a time. */
	int (*read)(void *source, void *buffer, uint64_t length, uint64_t offset,
		    struct pen_error *err);
	/* -ESTALE with words if it is not what it was at the start; NULL: it cannot be told. */
	int (*unchanged)(void *source, struct pen_error *err);
	void *source;
};

/* One file after the other, each on all cores. `files` are copied. */
int pack_start(enum pack_direction direction, const struct pack_file *files, size_t count,
	       const struct pen_pack_options *options, struct pen_pack **pack,
	       struct pen_error *err);

#endif
