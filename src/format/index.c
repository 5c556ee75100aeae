/* SPDX-License-Identifier: MIT */
/* Reading an index; see index.h. Everything is sorted once, so that nothing is searched. */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "base/text.h"
#include "format/index.h"
#include "format/json.h"
#include "format/words.h"
#include "sys/os.h"

#define MAP "weight_map"
#define SUFFIX ".safetensors.index.json"

struct reader {
	const char *name;
	const char *bytes;
	size_t length;
	struct index *index;
	const char **listed;	/* the file of each entry, not unique */
	char *texts;		/* room not used yet */
	struct pen_error *err;
};

/* Copy `path` without empty parts and "."; false if it is absolute, climbs or is nothing. */
static bool clean(const char *path, char *to)
{
	char *start = to;

	if (path[0] == '/')
		return false;
	while (*path) {
		size_t part = strcspn(path, "/");

		if (part == 2 && !memcmp(path, "..", 2))
			return false;
		if (part && !(part == 1 && path[0] == '.')) {
			if (to > start)
				*to++ = '/';
			memcpy(to, path, part);
			to += part;
		}
		path += part + (path[part] == '/');
	}
	*to = 0;
	return to > start;
}

static int bad_entry(const struct reader *reader, const char *tensor, const char *file)
{
	char shown[WORDS_NAME], shown_file[WORDS_NAME];
	int64_t at = format_json_find(reader->bytes, reader->length, tensor);

	words_name(shown, tensor);
	if (!file) {
		words_bad(reader->err, reader->name, at,
			  "the file of tensor \"%s\" is not given as a text", shown);
		error_hint(reader->err, "The file is damaged: download it again");
		return -EBADMSG;
	}
	words_bad(reader->err, reader->name, at,
		  "tensor \"%s\" is in \"%s\", which is %s", shown, words_name(shown_file, file),
		  file[0] ? "not inside the folder of the index" : "no name");
	error_hint(reader->err, "Name files by their path from the folder, without ..");
	return -EBADMSG;
}

static int allocate(struct reader *reader, const json_t *map)
{
	size_t count = json_object_size(map), texts = 0;
	const char *tensor;
	json_t *file;
	char *at;

	json_object_foreach((json_t *)map, tensor, file)
		texts += strlen(tensor) + 2 + json_string_length(file);
	reader->listed = os_calloc(count ? count : 1, sizeof(reader->listed[0]));
	at = os_calloc(1, sizeof(struct index) + count * (sizeof(struct index_entry) +
							   sizeof(char *)) + texts);
	reader->index = (struct index *)at;
	if (!at || !reader->listed)
		return error_sys(reader->err, -ENOMEM, "read", reader->name, -1);
	at += sizeof(struct index);
	reader->index->entries = (struct index_entry *)at;
	at += count * sizeof(struct index_entry);
	reader->index->files = (const char **)at;
	reader->texts = at + count * sizeof(char *);
	return 0;
}

static int fill(struct reader *reader, const json_t *map)
{
	struct index *index = reader->index;
	const char *tensor;
	json_t *file;

	json_object_foreach((json_t *)map, tensor, file) {
		const char *path = json_string_value(file);

		index->entries[index->count].tensor = reader->texts;
		reader->texts = stpcpy(reader->texts, tensor) + 1;
		if (!path || !clean(path, reader->texts))
			return bad_entry(reader, tensor, path);
		reader->listed[index->count] = index->files[index->count] = reader->texts;
		reader->texts += strlen(reader->texts) + 1;
		index->count++;
	}
	return 0;
}

static int by_text(const void *left, const void *right)
{
	return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static int by_tensor(const void *left, const void *right)
{
	return strcmp(((const struct index_entry *)left)->tensor,
		      ((const struct index_entry *)right)->tensor);
}

/* Files sorted and each once; entries told which is theirs, then sorted themselves. */
static void arrange(struct reader *reader)
{
	struct index *index = reader->index;

	qsort(index->files, index->count, sizeof(index->files[0]), by_text);
	for (size_t i = 0; i < index->count; i++)
		if (!i || strcmp(index->files[i], index->files[index->file_count - 1]))
			index->files[index->file_count++] = index->files[i];
	for (size_t i = 0; i < index->count; i++) {
		const char **file = bsearch(&reader->listed[i], index->files, index->file_count,
					    sizeof(index->files[0]), by_text);

		index->entries[i].file = (uint32_t)(file - index->files);
	}
	qsort(index->entries, index->count, sizeof(index->entries[0]), by_tensor);
}

static int read_map(struct reader *reader, const json_t *root)
{
	const json_t *map = json_object_get(root, MAP);
	int rc;

	if (!json_is_object(map)) {
		words_bad(reader->err, reader->name, -1,
			  map ? "its \"" MAP "\" is not a JSON object" : "it has no \"" MAP "\"");
		/* Found in a folder, or named as one: then it is one, and spoilt. */
		if (text_ends_with(reader->name, SUFFIX))
			error_hint(reader->err, "The index is damaged: download it again, or name "
				   "a .safetensors file itself");
		error_hint(reader->err, "Name a folder, a .safetensors file or an index: "
			   "model" SUFFIX);
		return -EBADMSG;
	}
	if (!json_object_size(map)) {
		words_bad(reader->err, reader->name, -1, "the index lists no tensors");
		error_hint(reader->err, "Download it again, or name a .safetensors file itself");
		return -EBADMSG;
	}
	rc = allocate(reader, map);
	if (!rc)
		rc = fill(reader, map);
	if (!rc)
		arrange(reader);
	return rc;
}

int index_parse(const char *name, const void *bytes, size_t length, struct index **index,
		struct pen_error *err)
{
	struct reader reader = { .name = name, .bytes = bytes, .length = length, .err = err };
	json_t *root;
	int rc;

	*index = NULL;
	rc = format_json_parse(name, "the index", bytes, length, 0, &root, err);
	if (rc)
		return rc;
	rc = read_map(&reader, root);
	json_decref(root);
	free(reader.listed);
	if (rc)
		free(reader.index);
	else
		*index = reader.index;
	return rc;
}
