/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_INDEX_H
#define FORMAT_INDEX_H
/*
 * model.safetensors.index.json says which tensor lies in which file of a model:
 * {"weight_map": {"tensor": "file", ...}, ...}; the rest is ignored. A pure function over bytes.
 *
 * True of every index that is accepted:
 *   1. Each tensor is listed once, as the file does last; each file too.
 *   2. A file's name leads to a place in the index's own folder or below, and has no empty part
 *      and no "." or ".." in it. (What links do is the owner's affair.)
 */
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

#define INDEX_SIZE_MAX 100000000u

struct index_entry {
	const char *tensor;
	size_t length;		/* of that name, which may hold a NUL */
	uint32_t file;		/* into files */
};

struct index {
	struct index_entry *entries;	/* by name of the tensor */
	size_t count;
	const char **files;		/* by name */
	size_t file_count;
};

/* `name` is for messages. Free it with free(). */
int index_parse(const char *name, const void *bytes, size_t length, struct index **index,
		struct pen_error *err);

#endif
