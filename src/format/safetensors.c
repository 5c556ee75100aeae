/* SPDX-License-Identifier: MIT */
/*
 * Reading the header of a safetensors file; see safetensors.h. jansson gives a tree, of which a
 * first walk adds up the room that the table needs and a second fills it, checking each tensor by
 * itself. Sorted by offset, one last walk sees holes and overlaps. The table is one allocation.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/text.h"
#include "format/dtype.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "format/words.h"
#include "sys/os.h"

#define PREFIX 8u	/* bytes before the header */
#define DAMAGED "The file is damaged: download or save it again"
#define CUT_SHORT "The file may be cut short: download it again"

struct reader {
	const char *name;		/* of the file */
	const unsigned char *header;
	size_t length;
	uint64_t file_size;
	struct safetensors *table;
	uint64_t *shapes;		/* room not used yet */
	char *texts;			/* likewise */
	struct pen_error *err;
};

/* ---------------------------------------------------------------------- before the header -- */

/* What people give us in place of a safetensors file. */
static void hint_other_format(struct pen_error *err, const unsigned char *first, uint64_t size)
{
	static const struct {
		const char *start;
		size_t length;
		const char *hint;
	} known[] = {
		{ "version ", 8, "It looks like a pointer of git-lfs: run git lfs pull" },
		{ "PK\3\4", 4, "It is a zip file, as torch.save writes: convert it" },
		{ "\x80\2", 2, "It is a pickle, as torch.save wrote: convert it" },
		{ "GGUF", 4, "It is a GGUF file: convert it to safetensors" },
		{ "\x89HDF", 4, "It is an HDF5 file: convert it to safetensors" },
		{ "<", 1, "It looks like a web page: the download went wrong" },
		{ "{", 1, "It looks like JSON; an index must have a name that ends in .json" },
	};

	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (size >= PREFIX && !memcmp(first, known[i].start, known[i].length))
			error_hint(err, "%s", known[i].hint);
}

int safetensors_header_length(const char *name, const unsigned char *first, uint64_t file_size,
			      size_t *length, struct pen_error *err)
{
	uint64_t said = 0;

	*length = 0;
	if (file_size < PREFIX) {
		words_bad(err, name, 0, "it has %llu bytes, too few for a safetensors file",
			  (unsigned long long)file_size);
		error_hint(err, CUT_SHORT);
		return -EBADMSG;
	}
	for (unsigned int i = 0; i < PREFIX; i++)
		said |= (uint64_t)first[i] << (8 * i);
	if (said > SAFETENSORS_HEADER_MAX) {
		words_bad(err, name, 0, "the header would be %llu bytes long, more than the %u "
			  "allowed", (unsigned long long)said, SAFETENSORS_HEADER_MAX);
		hint_other_format(err, first, file_size);
		error_hint(err, "It is no safetensors file, or damaged: download it again");
		return -EBADMSG;
	}
	if (said > file_size - PREFIX) {
		words_bad(err, name, (int64_t)file_size,
			  "the header has %llu bytes, but the file ends after %llu of them",
			  (unsigned long long)said, (unsigned long long)(file_size - PREFIX));
		hint_other_format(err, first, file_size);
		error_hint(err, CUT_SHORT);
		return -EBADMSG;
	}
	*length = (size_t)said;
	return 0;
}

/* ------------------------------------------------------------------------------ one tensor -- */

/* Where the entry of `key` stands in the file, for messages. */
static int64_t place(const struct reader *reader, const char *key)
{
	int64_t at = format_json_find(reader->header, reader->length, key);

	return at < 0 ? -1 : at + PREFIX;
}

/* Say what is wrong with a tensor; the message begins with its name. */
static int bad(const struct reader *reader, const char *tensor, const char *hint,
	       const char *format, ...) PRINTF_LIKE(4, 5);

static int bad(const struct reader *reader, const char *tensor, const char *hint,
	       const char *format, ...)
{
	char shown[WORDS_NAME], wrong[160];
	va_list args;

	va_start(args, format);
	vsnprintf(wrong, sizeof(wrong), format, args);
	va_end(args);
	words_bad(reader->err, reader->name, place(reader, tensor), "tensor \"%s\" %s",
		  words_name(shown, tensor), wrong);
	error_hint(reader->err, "%s", hint);
	return -EBADMSG;
}

static int read_dtype(struct reader *reader, struct pen_tensor *tensor, const json_t *entry)
{
	const json_t *value = json_object_get(entry, "dtype");
	char shown[40];

	if (!json_is_string(value))
		return bad(reader, tensor->name, DAMAGED, "has no \"dtype\" that is a text");
	tensor->dtype = dtype_parse(json_string_value(value));
	if (tensor->dtype >= 0)
		return 0;
	text_copy(shown, sizeof(shown), json_string_value(value));
	return bad(reader, tensor->name, "It may need a newer Penstock, or the file is damaged",
		   "has the unknown dtype \"%s\"", shown);
}

static int read_shape(struct reader *reader, struct pen_tensor *tensor, const json_t *entry,
		      uint64_t *elements)
{
	const json_t *shape = json_object_get(entry, "shape");
	size_t rank = json_array_size(shape);

	if (!json_is_array(shape))
		return bad(reader, tensor->name, DAMAGED, "has no \"shape\" that is a list");
	tensor->rank = (uint32_t)rank;
	tensor->shape = reader->shapes;
	*elements = 1;
	for (size_t i = 0; i < rank; i++) {
		const json_t *number = json_array_get(shape, i);

		if (!json_is_integer(number) || json_integer_value(number) < 0)
			return bad(reader, tensor->name, DAMAGED,
				   "has a shape whose number %zu is not whole and >= 0", i + 1);
		*reader->shapes = (uint64_t)json_integer_value(number);
		if (__builtin_mul_overflow(*elements, *reader->shapes++, elements))
			return bad(reader, tensor->name, DAMAGED,
				   "has a shape with more elements than 64 bits can count");
	}
	return 0;
}

static int read_offsets(struct reader *reader, struct pen_tensor *tensor, const json_t *entry)
{
	const json_t *offsets = json_object_get(entry, "data_offsets");
	long long number[2];

	if (!json_is_array(offsets) || json_array_size(offsets) != 2)
		return bad(reader, tensor->name, DAMAGED,
			   "has no \"data_offsets\" that are two numbers");
	for (size_t i = 0; i < 2; i++) {
		const json_t *value = json_array_get(offsets, i);

		number[i] = json_integer_value(value);
		if (!json_is_integer(value) || number[i] < 0)
			return bad(reader, tensor->name, DAMAGED,
				   "has data_offsets that are not whole numbers >= 0");
	}
	if (number[0] > number[1])
		return bad(reader, tensor->name, DAMAGED, "begins at %lld, after its end at %lld",
			   number[0], number[1]);
	tensor->offset = (uint64_t)number[0];
	tensor->bytes = (uint64_t)(number[1] - number[0]);
	return 0;
}

static const char *keep(struct reader *reader, const char *text, size_t *length)
{
	char *kept = reader->texts;

	reader->texts = stpcpy(kept, text) + 1;
	*length = (size_t)(reader->texts - kept) - 1;
	return kept;
}

static int read_tensor(struct reader *reader, const char *name, const json_t *entry)
{
	struct pen_tensor *tensor = &reader->table->tensors[reader->table->count++];
	uint64_t elements = 1, bytes;
	int rc;

	tensor->name = keep(reader, name, &tensor->name_length);
	if (!json_is_object(entry))
		return bad(reader, name, DAMAGED, "is not described by a JSON object");
	rc = read_dtype(reader, tensor, entry);
	if (!rc)
		rc = read_shape(reader, tensor, entry, &elements);
	if (!rc)
		rc = read_offsets(reader, tensor, entry);
	if (rc)
		return rc;
	if (!dtype_bytes(tensor->dtype, elements, &bytes))
		return bad(reader, name, DAMAGED, "has %llu elements of %u bits, which %s",
			   (unsigned long long)elements, pen_dtype_bits(tensor->dtype),
			   elements > UINT64_MAX / 64 ? "are more bytes than 64 bits can count"
						      : "do not fill whole bytes");
	if (bytes != tensor->bytes)
		return bad(reader, name, DAMAGED,
			   "has %llu bytes, but its shape and dtype %s need %llu",
			   (unsigned long long)tensor->bytes, pen_dtype_name(tensor->dtype),
			   (unsigned long long)bytes);
	return 0;
}

/* ---------------------------------------------------------------------------- the whole -- */

#define METADATA "__metadata__"

static void read_metadata(struct reader *reader, const json_t *entry)
{
	const char *key;
	json_t *value;

	json_object_foreach((json_t *)entry, key, value) {
		struct pen_metadata *pair =
			&reader->table->metadata[reader->table->metadata_count++];

		pair->key = keep(reader, key, &pair->key_length);
		pair->value = keep(reader, json_string_value(value), &pair->value_length);
	}
}

/* Texts and nothing else; null is none at all. */
static int check_metadata(struct reader *reader, const json_t *entry)
{
	char shown[WORDS_NAME];
	const char *key;
	json_t *value;

	if (!json_is_object(entry) && !json_is_null(entry)) {
		words_bad(reader->err, reader->name, place(reader, METADATA),
			  METADATA " is not a JSON object");
		error_hint(reader->err, DAMAGED);
		return -EBADMSG;
	}
	json_object_foreach((json_t *)entry, key, value) {
		if (json_is_string(value))
			continue;
		words_bad(reader->err, reader->name, place(reader, METADATA),
			  METADATA " has the key \"%s\" whose value is not a text",
			  words_name(shown, key));
		error_hint(reader->err, "Metadata must be texts: save the file again with such");
		return -EBADMSG;
	}
	return 0;
}

struct room {
	size_t tensors, metadata, numbers, texts;
	bool has_metadata;
};

static int measure(struct reader *reader, const json_t *root, struct room *room)
{
	const char *key, *inner;
	json_t *entry, *value;
	int rc;

	json_object_foreach((json_t *)root, key, entry) {
		if (strcmp(key, METADATA)) {
			room->tensors++;
			room->numbers += json_array_size(json_object_get(entry, "shape"));
			room->texts += strlen(key) + 1;
			continue;
		}
		rc = check_metadata(reader, entry);
		if (rc)
			return rc;
		room->has_metadata = true;
		json_object_foreach(entry, inner, value) {
			room->metadata++;
			room->texts += strlen(inner) + strlen(json_string_value(value)) + 2;
		}
	}
	return 0;
}

/* One piece of memory, cut up. All parts but the last are multiples of 8 bytes long. */
static int allocate(struct reader *reader, const struct room *room)
{
	struct safetensors *table;
	char *at;

	at = os_calloc(1, sizeof(*table) + room->tensors * sizeof(table->tensors[0]) +
				  room->metadata * sizeof(table->metadata[0]) +
				  room->numbers * sizeof(uint64_t) + room->texts);
	if (!at)
		return error_sys(reader->err, -ENOMEM, "read", reader->name, -1);
	table = reader->table = (struct safetensors *)at;
	at += sizeof(*table);
	table->tensors = (struct pen_tensor *)at;
	at += room->tensors * sizeof(table->tensors[0]);
	table->metadata = room->has_metadata ? (struct pen_metadata *)at : NULL;
	at += room->metadata * sizeof(table->metadata[0]);
	reader->shapes = (uint64_t *)at;
	reader->texts = at + room->numbers * sizeof(uint64_t);
	table->data = PREFIX + reader->length;
	return 0;
}

static int by_offset(const void *left, const void *right)
{
	const struct pen_tensor *a = left, *b = right;

	if (a->offset != b->offset)
		return a->offset < b->offset ? -1 : 1;
	if (a->bytes != b->bytes)
		return a->bytes < b->bytes ? -1 : 1;
	return strcmp(a->name, b->name);
}

/* Sorted, each begins where the one before ends; only then offsets become those of the file. */
static int check_order(struct reader *reader)
{
	struct safetensors *table = reader->table;
	uint64_t next = 0, room = reader->file_size - table->data;

	for (size_t i = 0; i < table->count; i++) {
		struct pen_tensor *tensor = &table->tensors[i];
		uint64_t begin = tensor->offset;

		if (begin > next)
			return bad(reader, tensor->name, DAMAGED,
				   "begins at %llu and leaves a hole from %llu on",
				   (unsigned long long)begin, (unsigned long long)next);
		if (begin < next)
			return bad(reader, tensor->name, DAMAGED,
				   "begins at %llu, before the one ahead of it ends at %llu",
				   (unsigned long long)begin, (unsigned long long)next);
		next = begin + tensor->bytes;
		tensor->offset += table->data;
	}
	if (next == room)
		return 0;
	if (next > room) {
		words_bad(reader->err, reader->name, (int64_t)reader->file_size,
			  "its tensors have %llu bytes, but the file ends after %llu of them",
			  (unsigned long long)next, (unsigned long long)room);
		error_hint(reader->err, CUT_SHORT);
	} else {
		words_bad(reader->err, reader->name, (int64_t)(table->data + next),
			  "%llu bytes after the last tensor belong to none",
			  (unsigned long long)(room - next));
		error_hint(reader->err, DAMAGED);
	}
	return -EBADMSG;
}

static int fill(struct reader *reader, const json_t *root)
{
	struct room room = { 0 };
	const char *key;
	json_t *entry;
	int rc;

	rc = measure(reader, root, &room);
	if (!rc)
		rc = allocate(reader, &room);
	if (rc)
		return rc;
	json_object_foreach((json_t *)root, key, entry) {
		if (!strcmp(key, METADATA)) {
			read_metadata(reader, entry);
			continue;
		}
		rc = read_tensor(reader, key, entry);
		if (rc)
			return rc;
	}
	qsort(reader->table->tensors, reader->table->count, sizeof(struct pen_tensor), by_offset);
	return check_order(reader);
}

int safetensors_parse(const char *name, const void *header, size_t length, uint64_t file_size,
		      struct safetensors **table, struct pen_error *err)
{
	struct reader reader = {
		.name = name, .header = header, .length = length,
		.file_size = file_size, .err = err,
	};
	json_t *root;
	int rc;

	*table = NULL;
	if (!length || reader.header[0] != '{') {
		words_bad(err, name, PREFIX, "the header does not begin with {");
		error_hint(err, "It is no safetensors file, or damaged: download it again");
		return -EBADMSG;
	}
	rc = format_json_parse(name, "the header", header, length, PREFIX, &root, err);
	if (rc)
		return rc;
	rc = fill(&reader, root);
	json_decref(root);
	if (rc) {
		free(reader.table);
		return rc;
	}
	*table = reader.table;
	return 0;
}
