/* SPDX-License-Identifier: MIT */
/* Reading an index; see index.h. Everything is sorted once, so that nothing is searched. */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include "base/text.h"
#include "format/index.h"
#include "format/scan.h"
#include "format/words.h"
#include "sys/os.h"

#define MAP "weight_map"
#define SUFFIX ".safetensors.index.json"

struct reader {
	struct scan scan;
	const unsigned char *map;	/* the value of the last weight_map; NULL: none */
	size_t count, room;		/* entries, and the bytes of their texts */
	struct index *index;
	char *texts;			/* room not used yet */
};

/* Make of `path` one without empty parts and "."; false if it is absolute, climbs or is nothing. */
static bool clean(char *path)
{
	char *to = path, *start = path;

	if (path[0] == '/')
		return false;
	while (*path) {
		size_t part = strcspn(path, "/");
		bool more = path[part] == '/';

		if (part == 2 && !memcmp(path, "..", 2))
			return false;
		if (part && !(part == 1 && path[0] == '.')) {
			if (to > start)
				*to++ = '/';
			memmove(to, path, part);
			to += part;
		}
		path += part + more;
	}
	*to = 0;
	return to > start;
}

/* The path of an entry's file follows the name of its tensor. */
static const char *path_of(const struct index_entry *entry)
{
	return entry->tensor + entry->length + 1;
}

static int no_text(const struct reader *reader, const struct scan_text *tensor, int64_t at)
{
	char shown[WORDS_NAME];

	words_bad(reader->scan.err, reader->scan.name, at,
		  "the file of tensor \"%s\" is not given as a text", scan_show(tensor, shown));
	error_hint(reader->scan.err, "The file is damaged: download it again");
	return -EBADMSG;
}

static int bad_path(const struct reader *reader, const struct scan_text *tensor,
		    const struct scan_text *path, int64_t at)
{
	char shown[WORDS_NAME], shown_path[WORDS_NAME];

	words_bad(reader->scan.err, reader->scan.name, at,
		  "tensor \"%s\" is in \"%s\", which is %s", scan_show(tensor, shown),
		  scan_show(path, shown_path),
		  path->length ? "not inside the folder of the index" : "no name");
	error_hint(reader->scan.err, "Name files by their path from the folder, without ..");
	return -EBADMSG;
}

static int keep(struct reader *reader, const struct scan_text *tensor,
		const struct scan_text *path, int64_t at)
{
	struct index_entry *entry = &reader->index->entries[reader->index->count++];
	char *kept = reader->texts + tensor->length + 1;

	scan_decode(tensor, reader->texts);
	scan_decode(path, kept);
	entry->tensor = reader->texts;
	entry->length = tensor->length;
	/* No file's name holds a NUL. */
	if (strlen(kept) != path->length || !clean(kept))
		return bad_path(reader, tensor, path, at);
	reader->texts = kept + path->length + 1;
	return 0;
}

/* One entry: added up while there is no index, then kept in it. */
static int read_entry(struct reader *reader)
{
	int64_t at = scan_place(&reader->scan);
	struct scan_text tensor, path;
	int rc = scan_key(&reader->scan, &tensor);
	int kind = rc ? rc : scan_kind(&reader->scan);

	if (kind != '"')
		return kind < 0 ? kind : no_text(reader, &tensor, at);
	rc = scan_text(&reader->scan, &path);
	if (rc || reader->index)
		return rc ? rc : keep(reader, &tensor, &path, at);
	reader->count++;
	reader->room += tensor.length + path.length + 2;
	return 0;
}

static int read_entries(struct reader *reader)
{
	struct scan *scan = &reader->scan;
	int more, rc;

	scan->at = reader->map;
	for (more = scan_first(scan, '}'); more > 0; more = scan_next(scan, '}')) {
		rc = read_entry(reader);
		if (rc)
			return rc;
	}
	return more;
}

static int allocate(struct reader *reader)
{
	char *at = os_calloc(1, sizeof(struct index) + reader->count *
			     (sizeof(struct index_entry) + sizeof(char *)) + reader->room);

	reader->index = (struct index *)at;
	if (!at)
		return error_sys(reader->scan.err, -ENOMEM, "read", reader->scan.name, -1);
	at += sizeof(struct index);
	reader->index->entries = (struct index_entry *)at;
	at += reader->count * sizeof(struct index_entry);
	reader->index->files = (const char **)at;
	reader->texts = at + reader->count * sizeof(char *);
	return 0;
}

static int by_text(const void *left, const void *right)
{
	return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static int by_tensor(const void *left, const void *right)
{
	const struct index_entry *a = left, *b = right;
	int order = text_order(a->tensor, a->length, b->tensor, b->length);

	/* Texts were kept in the order of the file. */
	return order ? order : a->tensor < b->tensor ? -1 : 1;
}

/* Of the same names the last one counts. */
static void drop_same_names(struct index *index)
{
	size_t kept = 0;

	for (size_t i = 0; i < index->count; i++) {
		const struct index_entry *entry = &index->entries[i], *next = entry + 1;

		if (i + 1 == index->count ||
		    text_order(entry->tensor, entry->length, next->tensor, next->length))
			index->entries[kept++] = *entry;
	}
	index->count = kept;
}

/* Entries sorted and each once, files too; entries told which is theirs. */
static void arrange(struct index *index)
{
	qsort(index->entries, index->count, sizeof(index->entries[0]), by_tensor);
	drop_same_names(index);
	for (size_t i = 0; i < index->count; i++)
		index->files[i] = path_of(&index->entries[i]);
	qsort(index->files, index->count, sizeof(index->files[0]), by_text);
	for (size_t i = 0; i < index->count; i++)
		if (!i || strcmp(index->files[i], index->files[index->file_count - 1]))
			index->files[index->file_count++] = index->files[i];
	for (size_t i = 0; i < index->count; i++) {
		const char *path = path_of(&index->entries[i]);
		const char **file = bsearch(&path, index->files, index->file_count,
					    sizeof(index->files[0]), by_text);

		index->entries[i].file = (uint32_t)(file - index->files);
	}
}

static int no_map(const struct reader *reader)
{
	words_bad(reader->scan.err, reader->scan.name, -1, reader->map
		  ? "its \"" MAP "\" is not a JSON object" : "it has no \"" MAP "\"");
	/* Found in a folder, or named as one: then it is one, and spoilt. */
	if (text_ends_with(reader->scan.name, SUFFIX))
		error_hint(reader->scan.err, "The index is damaged: download it again, or name a "
			   ".safetensors file itself");
	error_hint(reader->scan.err, "Name a folder, a .safetensors file or an index: model"
		   SUFFIX);
	return -EBADMSG;
}

/* All of it is read once, to find the map and what is wrong anywhere. */
static int find_map(struct reader *reader)
{
	struct scan *scan = &reader->scan;
	struct scan_text key;
	int more, rc;

	for (more = scan_first(scan, '}'); more > 0; more = scan_next(scan, '}')) {
		rc = scan_key(scan, &key);
		if (!rc && scan_kind(scan) > 0 && scan_text_is(&key, MAP))
			reader->map = scan->at;
		if (!rc)
			rc = scan_skip(scan);
		if (rc)
			return rc;
	}
	rc = more ? more : scan_finish(scan);
	return rc || (reader->map && *reader->map == '{') ? rc : no_map(reader);
}

static int read_map(struct reader *reader)
{
	int rc = read_entries(reader);

	if (rc)
		return rc;
	if (!reader->count) {
		words_bad(reader->scan.err, reader->scan.name, -1, "the index lists no tensors");
		error_hint(reader->scan.err,
			   "Download it again, or name a .safetensors file itself");
		return -EBADMSG;
	}
	rc = allocate(reader);
	if (!rc)
		rc = read_entries(reader);
	if (!rc)
		arrange(reader->index);
	return rc;
}

int index_parse(const char *name, const void *bytes, size_t length, struct index **index,
		struct pen_error *err)
{
	struct reader reader = { .index = NULL };
	int kind, rc;

	*index = NULL;
	scan_start(&reader.scan, name, "the index", bytes, length, 0, err);
	kind = scan_kind(&reader.scan);
	if (kind > 0 && kind != '{') {
		words_bad(err, name, scan_place(&reader.scan), "the index is not a JSON object");
		error_hint(err, "The file is damaged: download or save it again");
		return -EBADMSG;
	}
	rc = kind < 0 ? kind : find_map(&reader);
	if (!rc)
		rc = read_map(&reader);
	if (rc)
		free(reader.index);
	else
		*index = reader.index;
	return rc;
}
