/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_SAFETENSORS_WRITE_H
#define FORMAT_SAFETENSORS_WRITE_H
/*
 * The header of a safetensors file that is to be written, byte for byte as the safetensors package
 * writes it: metadata first, then the tensors as they lie, filled up with spaces. A pure function,
 * as is reading it (safetensors.h).
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

/* A file that is to be. */
struct safetensors_file {
	const char *name;			/* for messages */
	const struct pen_save_tensor *tensors;
	const uint64_t *bytes;			/* of each of these tensors */
	size_t *order;				/* those that are in this file */
	size_t count;
	const struct pen_metadata *metadata;	/* NULL: none, not even an empty one */
	size_t metadata_count;
	uint64_t align;				/* of the first tensor, a power of two from 8 on */
	bool placed;				/* the tensors lie as `order` has them already */
	uint64_t room;				/* the header is filled up to it; 0: none */
};

/* The length of a text of the caller's: 0 stands for "up to its NUL". */
size_t safetensors_length(const char *text, size_t length);

/* The bytes of a tensor; refuses what the format cannot hold. */
int safetensors_bytes(const struct pen_save_tensor *tensor, uint64_t *bytes,
		      struct pen_error *err);

/*
 * Sort `order` as the tensors will lie - the larger kinds of numbers first, then by name; or leave
 * it, where they are `placed` - and make the header: everything before the first tensor. Names must
 * differ. Free it with free().
 */
int safetensors_write(struct safetensors_file *file, char **header, size_t *size,
		      struct pen_error *err);

#endif
