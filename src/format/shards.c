/* SPDX-License-Identifier: MIT */
/* Models in several files; see shards.h. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "format/json_write.h"
#include "format/safetensors_write.h"
#include "format/shards.h"

#define UNDECIDED UINT32_MAX
#define SUFFIX ".safetensors"

/* The tensors from `first` to `end` that have no file yet get this one. */
static void close_file(uint32_t *files, size_t first, size_t end, size_t number)
{
	for (size_t i = first; i < end; i++)
		if (files[i] == UNDECIDED)
			files[i] = (uint32_t)number;
}

size_t shards_deal(const uint64_t *bytes, size_t count, uint64_t limit, uint32_t *files)
{
	/* A file gets its number when it is closed: a large tensor may come before it. */
	size_t number = 0, first = 0;
	uint64_t begun = 0;
	bool any = false;

	for (size_t i = 0; i < count; i++) {
		files[i] = UNDECIDED;
		if (bytes[i] > limit) {
			files[i] = (uint32_t)number++;
			continue;
		}
		if (bytes[i] > limit - begun) {
			close_file(files, first, i, number++);
			first = i;
			begun = 0;
		}
		begun += bytes[i];
		any = true;
	}
	if (any || !count)
		close_file(files, first, count, number++);
	return number;
}

void shards_name(size_t number, size_t count, char name[SHARDS_NAME_MAX])
{
	if (count == 1)
		snprintf(name, SHARDS_NAME_MAX, "model" SUFFIX);
	else
		snprintf(name, SHARDS_NAME_MAX, "model-%05zu-of-%05zu" SUFFIX, number + 1, count);
}

static const char *skip_digits(const char *at)
{
	size_t digits = strspn(at, "0123456789");

	return digits < 5 ? "" : at + digits;
}

bool shards_is_name(const char *name)
{
	if (strncmp(name, "model", 5))
		return false;
	name += 5;
	if (*name == '-') {
		name = skip_digits(name + 1);
		if (strncmp(name, "-of-", 4))
			return false;
		name = skip_digits(name + 4);
	}
	return !strcmp(name, SUFFIX);
}

/* As json.dumps(..., indent=2, sort_keys=True) writes it, with an end to its last line. */
int shards_index(const struct pen_save_tensor *tensors, const size_t *by_name, size_t count,
		 const uint32_t *files, const char *const *names, uint64_t total, char **text,
		 size_t *size, struct pen_error *err)
{
	struct json_text json = { .bytes = NULL };

	*text = NULL;
	json_print(&json, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n",
		   (unsigned long long)total);
	json_print(&json, "  \"weight_map\": {");
	for (size_t i = 0; i < count; i++) {
		const struct pen_save_tensor *tensor = &tensors[by_name[i]];
		const char *file = names[files[by_name[i]]];

		json_print(&json, "%s\n    ", i ? "," : "");
		json_quote(&json, tensor->name,
			    safetensors_length(tensor->name, tensor->name_length), true);
		json_put(&json, ": ", 2);
		json_quote(&json, file, strlen(file), true);
	}
	json_print(&json, "%s}\n}\n", count ? "\n  " : "");
	json_put(&json, "", 1);
	if (json.rc) {
		free(json.bytes);
		return json.rc == -EILSEQ ? error_set(err, -EINVAL, "save", SHARDS_INDEX, -1,
						      "a name is no UTF-8")
					  : error_sys(err, json.rc, "save", SHARDS_INDEX, -1);
	}
	*text = json.bytes;
	*size = json.length - 1;
	return 0;
}
