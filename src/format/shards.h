/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_SHARDS_H
#define FORMAT_SHARDS_H
/*
 * A model in several files, as the Hugging Face libraries cut and name them, and the index that
 * says which tensor lies in which. Pure functions; index.h reads what this writes.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

#define SHARDS_NAME_MAX 64
#define SHARDS_INDEX "model.safetensors.index.json"

/*
 * Give each tensor its file, in the order of the tensors: the next file where `limit` would be
 * passed; one that is larger by itself gets a file of its own, and the one that was begun goes on.
 * Returns how many files there are, at least one.
 */
size_t shards_deal(const uint64_t *bytes, size_t count, uint64_t limit, uint32_t *files);

/* model.safetensors where there is one file, model-00001-of-00002.safetensors and so on. */
void shards_name(size_t number, size_t count, char name[SHARDS_NAME_MAX]);

/* Is it a name that shards_name() might have given to a file of some model? */
bool shards_is_name(const char *name);

/* The index: `by_name` are the numbers of the tensors, sorted. `size` is without the NUL at its
 * end. Free it with free(). */
int shards_index(const struct pen_save_tensor *tensors, const size_t *by_name, size_t count,
		 const uint32_t *files, const char *const *names, uint64_t total, char **text,
		 size_t *size, struct pen_error *err);

#endif
