/* SPDX-License-Identifier: MIT */
#ifndef CLI_DCP_H
#define CLI_DCP_H
/*
 * Checkpoints of torch.distributed.checkpoint: a folder with .metadata and a file for each rank,
 * or one of these files. A file is one zip of torch's after the other, each with its own sums.
 * .metadata, a pickle that is not run here, says which tensors they are; it has no sums.
 */
#include <jansson.h>
#include <stdbool.h>
#include "penstock.h"

struct dcp {
	size_t file_count;
	uint64_t objects, bytes;	/* zips, and all bytes of the files */
	struct pen_torch_checked sums;	/* of all; `by` is what the least has */
	json_t *files;			/* each with its name, bytes and objects */
};

/* A file with the name of one, or a folder whose .metadata names some? */
bool dcp_is(const char *path);

/* Find all objects and, if it is asked for, verify each. Give it to dcp_free() in any case. */
int dcp_read(const char *path, bool verify, struct dcp *dcp, struct pen_error *err);
void dcp_free(struct dcp *dcp);

/* A line that says what it is, for people. */
void dcp_print(const struct dcp *dcp);

#endif
