/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_MODEL_H
#define FORMAT_MODEL_H
/*
 * An open model: its files, each with its table, and all their tensors in one list.
 *
 * Invariants
 *   1. Files are sorted by name, or as the caller has listed them; tensors by file and offset;
 *      names of tensors are unique.
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

#endif
