/* SPDX-License-Identifier: MIT */
/*
 * Reading the header of a safetensors file; see safetensors.h. A first walk over the bytes refuses
 * whatever is not of the right form and adds up the room that the table needs, a second fills it.
 * Of tensors with the same name the last one is kept. Sorted by offset, one walk over the tensors
 * sees sizes that do not fit, holes and overlaps. The table is one allocation.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/text.h"
#include "format/dtype.h"
#include "format/safetensors.h"
#include "format/scan.h"
#include "format/words.h"
#include "sys/os.h"

#define PREFIX 8u	/* bytes before the header */
#define DAMAGED "The file is damaged: download or save it again"
#define CUT_SHORT "The file may be cut short: download it again"

struct room {
	size_t tensors, metadata, numbers, texts;
	bool has_metadata;		/* maybe an empty one */
};

struct reader {
	struct scan scan;
	uint64_t file_size;
	struct room room;		/* added up by the first walk */
	struct safetensors *table;	/* filled by the second; NULL before */
	uint64_t *shapes;		/* room not used yet */
	char *texts;			/* likewise */
	struct scan_text key;		/* of the entry that is read */
	uint32_t key_at;		/* where it stands in the file */
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
		{ "PK\3\4", 4, "It is a zip file, as torch.save writes: in Python, penstock.load() "
		  "loads it, and penstock.save_file() makes a safetensors file of its tensors" },
		{ "\x80\2", 2, "It is a pickle, as torch.save wrote: in Python, torch.load() loads "
		  "it, and penstock.save_file() makes a safetensors file of its tensors" },
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

/* ---------------------------------------------------------------------- what can be wrong -- */

static int bad_entry(const struct reader *reader, int64_t at, const char *shown, const char *hint,
		     const char *format, va_list args)
{
	char wrong[160];

	vsnprintf(wrong, sizeof(wrong), format, args);
	words_bad(reader->scan.err, reader->scan.name, at, "tensor \"%s\" %s", shown, wrong);
	error_hint(reader->scan.err, "%s", hint);
	return -EBADMSG;
}

/* Say what is wrong with the tensor that is read; the message begins with its name. */
static int bad(const struct reader *reader, const char *hint, const char *format, ...)
	PRINTF_LIKE(3, 4);

static int bad(const struct reader *reader, const char *hint, const char *format, ...)
{
	char shown[WORDS_NAME];
	va_list args;

	va_start(args, format);
	bad_entry(reader, reader->key_at, scan_show(&reader->key, shown), hint, format, args);
	va_end(args);
	return -EBADMSG;
}

/* Before each name lies where it stands in the file. */
static int64_t place(const struct pen_tensor *tensor)
{
	uint32_t at;

	memcpy(&at, tensor->name - sizeof(at), sizeof(at));
	return at;
}

/* The same of one in the table. */
static int bad_tensor(const struct reader *reader, const struct pen_tensor *tensor,
		      const char *format, ...) PRINTF_LIKE(3, 4);

static int bad_tensor(const struct reader *reader, const struct pen_tensor *tensor,
		      const char *format, ...)
{
	char shown[WORDS_NAME];
	va_list args;

	va_start(args, format);
	bad_entry(reader, place(tensor), words_text(shown, tensor->name, tensor->name_length),
		  DAMAGED, format, args);
	va_end(args);
	return -EBADMSG;
}

/* ------------------------------------------------------------------------------ one tensor -- */

/* What the header says of a tensor. Its fields are an object, or a list in this order. */
enum field { DTYPE, SHAPE, OFFSETS, FIELDS };

static const char *const field_names[FIELDS] = { "dtype", "shape", "data_offsets" };

struct entry {
	bool has[FIELDS];
	int dtype;
	uint32_t rank;
	uint64_t number[2];	/* the data_offsets */
};

/* The name of a variant, or, as the reference takes it too, {"name":null}. */
static int read_variant(struct reader *reader, struct scan_text *text)
{
	static const char wrong[] = "has no \"dtype\" that is a text";
	struct scan *scan = &reader->scan;
	int kind = scan_kind(scan), rc;

	if (kind < 0 || kind == '"')
		return kind < 0 ? kind : scan_text(scan, text);
	if (kind != '{')
		return bad(reader, DAMAGED, wrong);
	rc = scan_first(scan, '}');
	if (rc > 0)
		rc = scan_key(scan, text);
	else
		return rc ? rc : bad(reader, DAMAGED, wrong);
	kind = rc ? rc : scan_kind(scan);
	if (kind < 0 || kind != 'n')
		return kind < 0 ? kind : bad(reader, DAMAGED, wrong);
	rc = scan_skip(scan);
	if (!rc)
		rc = scan_next(scan, '}');
	return rc > 0 ? bad(reader, DAMAGED, wrong) : rc;
}

static int read_dtype(struct reader *reader, struct entry *entry)
{
	struct scan_text text;
	char name[16], shown[WORDS_NAME];
	int rc = read_variant(reader, &text);

	if (rc)
		return rc;
	entry->dtype = -1;
	if (text.length < sizeof(name)) {
		scan_decode(&text, name);
		entry->dtype = dtype_parse(name, text.length);
	}
	if (entry->dtype >= 0)
		return 0;
	return bad(reader, "It may need a newer Penstock, or the file is damaged",
		   "has the unknown dtype \"%s\"", scan_show(&text, shown));
}

/* 1: a whole number; 0: a value of another kind; or an error. */
static int read_whole(struct reader *reader, uint64_t *value)
{
	struct scan_number number;
	int kind = scan_kind(&reader->scan), rc;

	if (kind != '0')
		return kind < 0 ? kind : 0;
	rc = scan_number(&reader->scan, &number);
	*value = number.value;
	return rc ? rc : number.whole;
}

static int read_shape(struct reader *reader, struct entry *entry)
{
	struct scan *scan = &reader->scan;
	int kind = scan_kind(scan), more, rc;
	uint64_t value;

	if (kind != '[')
		return kind < 0 ? kind : bad(reader, DAMAGED, "has no \"shape\" that is a list");
	entry->rank = 0;
	for (more = scan_first(scan, ']'); more > 0; more = scan_next(scan, ']')) {
		rc = read_whole(reader, &value);
		entry->rank++;
		if (rc <= 0)
			return rc ? rc : bad(reader, DAMAGED, "has a shape whose number %u is not "
					     "whole and >= 0", entry->rank);
		if (reader->table)
			*reader->shapes++ = value;
	}
	return more;
}

static int read_offsets(struct reader *reader, struct entry *entry)
{
	static const char wrong[] = "has no \"data_offsets\" that are two numbers";
	struct scan *scan = &reader->scan;
	int kind = scan_kind(scan), more, rc;
	unsigned int count = 0;

	if (kind != '[')
		return kind < 0 ? kind : bad(reader, DAMAGED, wrong);
	for (more = scan_first(scan, ']'); more > 0; more = scan_next(scan, ']')) {
		if (count == 2)
			return bad(reader, DAMAGED, wrong);
		rc = read_whole(reader, &entry->number[count++]);
		if (rc <= 0)
			return rc ? rc : bad(reader, DAMAGED, "has data_offsets that are not whole "
					     "numbers >= 0");
	}
	return more || count == 2 ? more : bad(reader, DAMAGED, wrong);
}

static int read_field(struct reader *reader, struct entry *entry, enum field field)
{
	if (entry->has[field])
		return bad(reader, DAMAGED, "has its \"%s\" twice", field_names[field]);
	entry->has[field] = true;
	switch (field) {
	case DTYPE:
		return read_dtype(reader, entry);
	case SHAPE:
		return read_shape(reader, entry);
	case OFFSETS:
		return read_offsets(reader, entry);
	default:
		return scan_skip(&reader->scan);
	}
}

static int read_named_field(struct reader *reader, struct entry *entry)
{
	struct scan_text key;
	int rc = scan_key(&reader->scan, &key);

	if (rc)
		return rc;
	for (enum field field = DTYPE; field < FIELDS; field++)
		if (scan_text_is(&key, field_names[field]))
			return read_field(reader, entry, field);
	return scan_skip(&reader->scan);
}

static int read_entry(struct reader *reader, struct entry *entry)
{
	struct scan *scan = &reader->scan;
	int kind = scan_kind(scan), more, rc;
	enum field next = DTYPE;
	char close = kind == '{' ? '}' : ']';

	if (kind != '{' && kind != '[')
		return kind < 0 ? kind : bad(reader, DAMAGED, "is not described by a JSON object");
	for (more = scan_first(scan, close); more > 0; more = scan_next(scan, close)) {
		if (kind == '[' && next == FIELDS)
			return bad(reader, DAMAGED, "has more than dtype, shape and data_offsets "
				   "in its list");
		rc = kind == '{' ? read_named_field(reader, entry)
				 : read_field(reader, entry, next++);
		if (rc)
			return rc;
	}
	for (enum field field = DTYPE; field < FIELDS && !more; field++)
		if (!entry->has[field])
			return bad(reader, DAMAGED, "has no \"%s\"", field_names[field]);
	return more;
}

static const char *keep(struct reader *reader, const struct scan_text *text)
{
	char *kept = reader->texts;

	scan_decode(text, kept);
	reader->texts += text->length + 1;
	return kept;
}

static int read_tensor(struct reader *reader)
{
	struct entry entry = { .rank = 0 };
	const uint64_t *shape = reader->shapes;
	struct pen_tensor *tensor;
	int rc = read_entry(reader, &entry);

	if (rc)
		return rc;
	if (!reader->table) {
		reader->room.tensors++;
		reader->room.numbers += entry.rank;
		reader->room.texts += sizeof(reader->key_at) + reader->key.length + 1;
		return 0;
	}
	tensor = &reader->table->tensors[reader->table->count++];
	reader->texts = mempcpy(reader->texts, &reader->key_at, sizeof(reader->key_at));
	tensor->name = keep(reader, &reader->key);
	tensor->name_length = reader->key.length;
	tensor->dtype = entry.dtype;
	tensor->rank = entry.rank;
	tensor->shape = shape;
	tensor->offset = entry.number[0];
	/* It may end before it begins, which is seen later: another of its name may count. */
	tensor->bytes = entry.number[1] - entry.number[0];
	return 0;
}

/* -------------------------------------------------------------------------------- metadata -- */

#define METADATA "__metadata__"

static int bad_metadata(const struct reader *reader, const char *wrong, const char *hint)
{
	words_bad(reader->scan.err, reader->scan.name, reader->key_at, "%s", wrong);
	error_hint(reader->scan.err, "%s", hint);
	return -EBADMSG;
}

static int read_pair(struct reader *reader)
{
	char shown[WORDS_NAME], wrong[2 * WORDS_NAME];
	struct scan_text key, value;
	struct pen_metadata *pair;
	int rc = scan_key(&reader->scan, &key);
	int kind = rc ? rc : scan_kind(&reader->scan);

	if (kind >= 0 && kind != '"') {
		snprintf(wrong, sizeof(wrong), METADATA " has the key \"%s\" whose value is not a "
			 "text", scan_show(&key, shown));
		return bad_metadata(reader, wrong,
				    "Metadata must be texts: save the file again with such");
	}
	rc = kind < 0 ? kind : scan_text(&reader->scan, &value);
	if (rc)
		return rc;
	if (!reader->table) {
		reader->room.metadata++;
		reader->room.texts += key.length + value.length + 2;
		return 0;
	}
	pair = &reader->table->metadata[reader->table->metadata_count++];
	pair->key = keep(reader, &key);
	pair->key_length = key.length;
	pair->value = keep(reader, &value);
	pair->value_length = value.length;
	return 0;
}

/* Texts and nothing else; null is none at all. */
static int read_metadata(struct reader *reader, bool *seen)
{
	struct scan *scan = &reader->scan;
	int kind = scan_kind(scan), more, rc;

	if (kind < 0)
		return kind;
	if (*seen)
		return bad_metadata(reader, "the header has " METADATA " twice", DAMAGED);
	*seen = true;
	if (kind == 'n')
		return scan_skip(scan);
	if (kind != '{')
		return bad_metadata(reader, METADATA " is not a JSON object", DAMAGED);
	reader->room.has_metadata = true;
	for (more = scan_first(scan, '}'); more > 0; more = scan_next(scan, '}')) {
		rc = read_pair(reader);
		if (rc)
			return rc;
	}
	return more;
}

static int by_key(const void *left, const void *right)
{
	const struct pen_metadata *a = left, *b = right;
	int order = text_order(a->key, a->key_length, b->key, b->key_length);

	return order ? order : a->key < b->key ? -1 : 1;
}

static int by_place(const void *left, const void *right)
{
	const struct pen_metadata *a = left, *b = right;

	return a->key < b->key ? -1 : 1;
}

/* Of the same keys the last one counts; texts were kept in the order of the file. */
static void drop_same_keys(struct safetensors *table)
{
	struct pen_metadata *pairs = table->metadata;
	size_t count = table->metadata_count, kept = 0;

	if (count < 2)
		return;
	qsort(pairs, count, sizeof(pairs[0]), by_key);
	for (size_t i = 0; i < count; i++)
		if (i + 1 == count || text_order(pairs[i].key, pairs[i].key_length,
						 pairs[i + 1].key, pairs[i + 1].key_length))
			pairs[kept++] = pairs[i];
	table->metadata_count = kept;
	qsort(pairs, kept, sizeof(pairs[0]), by_place);
}

/* ------------------------------------------------------------------------- the whole header -- */

static int walk(struct reader *reader)
{
	struct scan *scan = &reader->scan;
	bool metadata = false;
	int more, rc;

	for (more = scan_first(scan, '}'); more > 0; more = scan_next(scan, '}')) {
		reader->key_at = (uint32_t)scan_place(scan);
		rc = scan_key(scan, &reader->key);
		if (!rc)
			rc = scan_text_is(&reader->key, METADATA) ? read_metadata(reader, &metadata)
								  : read_tensor(reader);
		if (rc)
			return rc;
	}
	return more ? more : scan_finish(scan);
}

/* One piece of memory, cut up. All parts but the last are multiples of 8 bytes long. */
static int allocate(struct reader *reader, size_t header)
{
	const struct room *room = &reader->room;
	struct safetensors *table;
	char *at;

	at = os_calloc(1, sizeof(*table) + room->metadata * sizeof(table->metadata[0]) +
		       room->tensors * (sizeof(table->tensors[0]) + sizeof(table->by_name[0])) +
		       room->numbers * sizeof(uint64_t) + room->texts);
	if (!at)
		return error_sys(reader->scan.err, -ENOMEM, "read", reader->scan.name, -1);
	table = reader->table = (struct safetensors *)at;
	at += sizeof(*table);
	table->tensors = (struct pen_tensor *)at;
	at += room->tensors * sizeof(table->tensors[0]);
	table->by_name = (const struct pen_tensor **)at;
	at += room->tensors * sizeof(table->by_name[0]);
	table->metadata = room->has_metadata ? (struct pen_metadata *)at : NULL;
	at += room->metadata * sizeof(table->metadata[0]);
	reader->shapes = (uint64_t *)at;
	reader->texts = at + room->numbers * sizeof(uint64_t);
	table->data = PREFIX + header;
	return 0;
}

static int by_offset(const void *left, const void *right)
{
	const struct pen_tensor *a = left, *b = right;

	if (a->offset != b->offset)
		return a->offset < b->offset ? -1 : 1;
	if (a->bytes != b->bytes)
		return a->bytes < b->bytes ? -1 : 1;
	return text_order(a->name, a->name_length, b->name, b->name_length);
}

static void sort_by_offset(struct safetensors *table)
{
	size_t sorted = 1;

	/* Most writers list tensors as they lie. */
	while (sorted < table->count &&
	       by_offset(&table->tensors[sorted - 1], &table->tensors[sorted]) <= 0)
		sorted++;
	if (sorted < table->count)
		qsort(table->tensors, table->count, sizeof(table->tensors[0]), by_offset);
}

static int by_name(const void *left, const void *right)
{
	const struct pen_tensor *a = *(const struct pen_tensor *const *)left;
	const struct pen_tensor *b = *(const struct pen_tensor *const *)right;
	int order = text_order(a->name, a->name_length, b->name, b->name_length);

	/* Names were kept in the order of the file. */
	return order ? order : a->name < b->name ? -1 : 1;
}

static void sort_by_name(struct safetensors *table)
{
	for (size_t i = 0; i < table->count; i++)
		table->by_name[i] = &table->tensors[i];
	qsort(table->by_name, table->count, sizeof(table->by_name[0]), by_name);
}

static bool same_name(const struct pen_tensor *a, const struct pen_tensor *b)
{
	return a->name_length == b->name_length && !memcmp(a->name, b->name, a->name_length);
}

/* Of the same names the last one counts. */
static void drop_same_names(struct safetensors *table)
{
	size_t kept = 0;
	bool any = false;

	for (size_t i = 0; i + 1 < table->count; i++)
		if (same_name(table->by_name[i], table->by_name[i + 1])) {
			table->tensors[table->by_name[i] - table->tensors].name = NULL;
			any = true;
		}
	if (!any)
		return;
	for (size_t i = 0; i < table->count; i++)
		if (table->tensors[i].name)
			table->tensors[kept++] = table->tensors[i];
	table->count = kept;
	sort_by_name(table);
}

static int check_size(const struct reader *reader, const struct pen_tensor *tensor)
{
	uint64_t elements = 1, bytes, end;

	for (uint32_t i = 0; i < tensor->rank; i++)
		if (__builtin_mul_overflow(elements, tensor->shape[i], &elements))
			return bad_tensor(reader, tensor, "has a shape with more elements than 64 "
					  "bits can count");
	if (__builtin_add_overflow(tensor->offset, tensor->bytes, &end))
		return bad_tensor(reader, tensor, "begins at %llu, after its end at %llu",
				  (unsigned long long)tensor->offset, (unsigned long long)end);
	if (!dtype_bytes(tensor->dtype, elements, &bytes))
		return bad_tensor(reader, tensor, "has %llu elements of %u bits, which %s",
				  (unsigned long long)elements, pen_dtype_bits(tensor->dtype),
				  elements > UINT64_MAX / 64
					  ? "are more bytes than 64 bits can count"
					  : "do not fill whole bytes");
	if (bytes != tensor->bytes)
		return bad_tensor(reader, tensor,
				  "has %llu bytes, but its shape and dtype %s need %llu",
				  (unsigned long long)tensor->bytes, pen_dtype_name(tensor->dtype),
				  (unsigned long long)bytes);
	return 0;
}

static int check_end(const struct reader *reader, uint64_t next)
{
	uint64_t data = reader->table->data, room = reader->file_size - data;

	if (next > room) {
		words_bad(reader->scan.err, reader->scan.name, (int64_t)reader->file_size,
			  "its tensors have %llu bytes, but the file ends after %llu of them",
			  (unsigned long long)next, (unsigned long long)room);
		error_hint(reader->scan.err, CUT_SHORT);
		return -EBADMSG;
	}
	if (next < room) {
		words_bad(reader->scan.err, reader->scan.name, (int64_t)(data + next),
			  "%llu bytes after the last tensor belong to none",
			  (unsigned long long)(room - next));
		error_hint(reader->scan.err, DAMAGED);
		return -EBADMSG;
	}
	return 0;
}

/* Sorted, each begins where the one before ends; only then offsets become those of the file. */
static int check_order(struct reader *reader)
{
	struct safetensors *table = reader->table;
	uint64_t next = 0;

	for (size_t i = 0; i < table->count; i++) {
		struct pen_tensor *tensor = &table->tensors[i];
		uint64_t begin = tensor->offset;
		int rc = check_size(reader, tensor);

		if (rc)
			return rc;
		if (begin > next)
			return bad_tensor(reader, tensor,
					  "begins at %llu and leaves a hole from %llu on",
					  (unsigned long long)begin, (unsigned long long)next);
		if (begin < next)
			return bad_tensor(reader, tensor,
					  "begins at %llu, before the one ahead of it ends at %llu",
					  (unsigned long long)begin, (unsigned long long)next);
		next = begin + tensor->bytes;
		tensor->offset += table->data;
	}
	return check_end(reader, next);
}

static int fill(struct reader *reader, const void *header, size_t length)
{
	struct scan again;
	int rc = allocate(reader, length);

	if (rc)
		return rc;
	scan_start(&again, reader->scan.name, reader->scan.what, header, length, PREFIX,
		   reader->scan.err);
	reader->scan = again;
	scan_kind(&reader->scan);
	rc = walk(reader);
	if (rc)
		return rc;
	drop_same_keys(reader->table);
	sort_by_offset(reader->table);
	sort_by_name(reader->table);
	drop_same_names(reader->table);
	return check_order(reader);
}

int safetensors_parse(const char *name, const void *header, size_t length, uint64_t file_size,
		      struct safetensors **table, struct pen_error *err)
{
	struct reader reader = { .file_size = file_size };
	int rc;

	*table = NULL;
	scan_start(&reader.scan, name, "the header", header, length, PREFIX, err);
	if (scan_kind(&reader.scan) != '{') {
		words_bad(err, name, scan_place(&reader.scan), "the header does not begin with {");
		error_hint(err, "It is no safetensors file, or damaged: download it again");
		return -EBADMSG;
	}
	rc = walk(&reader);
	if (!rc)
		rc = fill(&reader, header, length);
	if (rc) {
		free(reader.table);
		return rc;
	}
	*table = reader.table;
	return 0;
}
