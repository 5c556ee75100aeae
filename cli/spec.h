/* SPDX-License-Identifier: MIT */
#ifndef CLI_SPEC_H
#define CLI_SPEC_H
/*
 * The shape of a made-up model: which files it has, which tensors lie in them and where. It is made
 * from what the user writes - "0.6b", "7b", a list of properties such as "layers=4,hidden=256", or
 * a JSON file that lists files and tensors - and has everything but the numbers.
 */
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

#define SPEC_RANK_MAX 16

struct spec_tensor {
	char *name;
	int dtype;		/* enum pen_dtype */
	uint32_t rank;
	uint64_t shape[SPEC_RANK_MAX];
	uint64_t bytes;
	uint64_t offset;	/* of its first byte in the file */
	size_t file;
};

struct spec_file {
	const char *name;
	const char *header;	/* what comes before the tensors */
	size_t header_size;
	size_t first, count;	/* its tensors, in the order of their offsets */
	uint64_t size;
};

struct spec {
	struct spec_file *files;
	size_t file_count;
	struct spec_tensor *tensors;
	size_t tensor_count;
	uint64_t bytes;		/* of all tensors */
	struct pen_layout *layout;	/* what the library makes of it: names, headers, index */
	char **names;		/* of files, where the user gives them */
	size_t name_count;
	char *config;		/* the text of config.json; NULL: there is none */
	const char *index;	/* that of the index */
};

int spec_init(struct spec *spec, const char *text, struct pen_error *err);
void spec_fini(struct spec *spec);

#endif
