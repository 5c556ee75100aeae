/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_MODEL_H
#define FORMAT_MODEL_H
/*
 * An open model: its files, each with its table, and all their tensors in one list.
 *
 * Invariants
 *   1. Files are sorted by name, or as the caller has listed them; tensors by file and offset,
 *      those of a coded file by the offsets that they had; names of tensors are unique.
 *   2. Names and shapes lie in the tables, which live as long as the model.
 */
#include <stddef.h>
#include "format/safetensors.h"
#include "penstock.h"

struct pen_model {
	int start;				/* what relative paths of files start at */
	struct pen_model_file *files;
	struct safetensors **tables;		/* one for each file; in `coded` where it is */
	struct coded **coded;			/* one for each file; NULL: it is not coded */
	size_t file_count;
	struct pen_tensor *tensors;
	const struct pen_tensor **by_name;	/* the same, sorted by name */
	size_t tensor_count;
	char **warnings;
	size_t warning_count;
};

/*
 * The table of one file of so many bytes, and what it is coded by, if it is. After an error, too,
 * the caller frees `coded`, which has the table, or the table where that is NULL.
 */
int model_read_header(struct pen_object *object, uint64_t size, struct safetensors **table,
		      struct coded **coded, struct pen_error *err);

#endif
