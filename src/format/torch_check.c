/* SPDX-License-Identifier: MIT */
/*
 * Verifying a file of torch's as its bytes pass. The engine makes CRC32s of chunks, cut where
 * records begin and end. They are compared one by one with the file's table of digests, where it
 * has one, and, joined, with what the zip says of each record. So what was written by torch itself
 * is verified, too, record by record; and what was read in part at least chunk by chunk.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/digest.h"
#include "base/error.h"
#include "engine/schedule.h"
#include "format/torch.h"
#include "format/words.h"
#include "sys/os.h"

#define MAGIC "PSDIGEST"
#define TABLE_VERSION 1u
#define CHUNK_MIN (64u << 10)
#define CHUNK_MAX (16u << 20)
#define WINDOW (64u << 20)	/* what pen_torch_verify() reads at once; a multiple of any chunk */
#define DAMAGED "The file is damaged: take another copy of it"

/* What is known of one zip. */
struct known {
	struct pen_torch *file;
	unsigned char *record;		/* the table's record; NULL: there is none that is right */
	struct torch_table table;	/* its chunk is that of the digests where there is none */
	int by;
};

struct pen_torch_check {
	struct pen_digests digests;
	size_t count;
	struct known known[];		/* zips of one object */
};

/* ------------------------------------------------------------------------------- digests -- */

uint64_t torch_chunk(const struct pen_options *options, uint64_t most)
{
	uint64_t chunk = most;

	if (!options)
		return chunk;
	while (chunk > CHUNK_MIN && ((options->request_size && chunk > options->request_size) ||
				     (options->memory_limit && chunk > options->memory_limit / 2)))
		chunk /= 2;
	return chunk;
}

uint64_t torch_chunks(uint64_t chunk, uint64_t offset, uint64_t bytes)
{
	return bytes ? (offset + bytes - 1) / chunk - offset / chunk + 1 : 0;
}

int torch_digests_init(struct pen_digests *digests, struct pen_object *object, uint64_t chunk,
		       uint64_t end, size_t room)
{
	uint64_t count = end / chunk + 1 + room;

	*digests = (struct pen_digests){
		.object = object, .chunk = chunk, .count = count, .kind = PEN_DIGEST_CRC32,
		.values = os_calloc((size_t)count, sizeof(digests->values[0])),
		.states = os_calloc((size_t)count, 1),
		.cuts = os_calloc(room + 1, sizeof(digests->cuts[0])),
	};
	return digests->values && digests->states && digests->cuts ? 0 : -ENOMEM;
}

void torch_digests_fini(struct pen_digests *digests)
{
	free(digests->values);
	free(digests->states);
	free((void *)digests->cuts);
}

static void cut(struct pen_digests *digests, uint64_t at)
{
	uint64_t *cuts = (uint64_t *)digests->cuts;
	size_t count = digests->cut_count;

	if (at % digests->chunk && (!count || cuts[count - 1] < at))
		cuts[digests->cut_count++] = at;
}

void torch_digests_cut(struct pen_digests *digests, uint64_t offset, uint64_t bytes)
{
	if (!bytes)
		return;
	cut(digests, offset);
	cut(digests, offset + bytes);
}

uint64_t torch_digests_first(const struct pen_digests *digests, uint64_t offset)
{
	size_t low = 0, high = digests->cut_count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (digests->cuts[middle] <= offset)
			low = middle + 1;
		else
			high = middle;
	}
	return offset / digests->chunk + low;
}

/* ----------------------------------------------------------------------------- the table -- */

uint64_t torch_places(uint64_t before, uint64_t offset, uint64_t bytes)
{
	unsigned char words[24], *at = zip_put(words, before, 8);

	at = zip_put(at, offset, 8);
	zip_put(at, bytes, 8);
	return digest_kind(PEN_DIGEST_XXH3)->of(words, sizeof(words));
}

void torch_table_put(unsigned char to[TORCH_TABLE_HEAD], const struct torch_table *table)
{
	unsigned char *at = (unsigned char *)memcpy(to, MAGIC, 8) + 8;

	at = zip_put(at, TABLE_VERSION, 4);
	at = zip_put(at, PEN_DIGEST_CRC32, 4);
	at = zip_put(at, table->chunk, 8);
	at = zip_put(at, table->places, 8);
	zip_put(at, table->count, 8);
}

static int bad_table(const struct pen_torch *file, const struct pen_torch_record *record,
		     const char *what, struct pen_error *err)
{
	words_bad(err, file->path, (int64_t)record->offset, "its table of digests %s", what);
	error_hint(err, DAMAGED);
	return -EBADMSG;
}

/* What a table of this file says of itself must be. */
static struct torch_table expected_table(const struct pen_torch *file, uint64_t chunk)
{
	struct torch_table table = { .chunk = chunk };

	for (size_t i = 0; i < file->record_count; i++) {
		const struct pen_torch_record *record = &file->records[i];

		if (!torch_is_storage(record))
			continue;
		table.places = torch_places(table.places, record->offset, record->bytes);
		table.count += torch_chunks(chunk, record->offset, record->bytes);
	}
	return table;
}

/* One of a later kind, or of a file that was packed anew since, is as good as none. */
static int use_table(struct known *known, const struct pen_torch_record *record,
		     struct pen_error *err)
{
	const unsigned char *head = known->record;
	struct torch_table wanted;
	uint64_t chunk;

	if (record->bytes < TORCH_TABLE_HEAD || memcmp(head, MAGIC, 8))
		return bad_table(known->file, record, "does not begin like one", err);
	chunk = zip_get(head + 16, 8);
	if (zip_get(head + 8, 4) != TABLE_VERSION || zip_get(head + 12, 4) != PEN_DIGEST_CRC32)
		return 0;
	if (chunk < CHUNK_MIN || chunk > CHUNK_MAX || chunk & (chunk - 1))
		return bad_table(known->file, record, "has chunks of a size that is none", err);
	wanted = expected_table(known->file, chunk);
	if (zip_get(head + 24, 8) != wanted.places)
		return 0;
	if (zip_get(head + 32, 8) != wanted.count ||
	    (record->bytes - TORCH_TABLE_HEAD) / 8 != wanted.count || record->bytes % 8)
		return bad_table(known->file, record, "has not one for each chunk", err);
	known->table = wanted;
	known->by = PEN_TORCH_BY_TABLE;
	return 0;
}

static int read_table(struct known *known, struct pen_error *err)
{
	const struct pen_torch_record *record = pen_torch_find(known->file, TORCH_TABLE);
	int rc;

	if (!record || record->flags & PEN_TORCH_PACKED)
		return 0;
	if (record->bytes > TORCH_TABLE_MAX)
		return bad_table(known->file, record, "is larger than any", err);
	known->record = os_calloc(1, (size_t)record->bytes + 1);
	if (!known->record)
		return error_sys(err, -ENOMEM, "verify", known->file->path, -1);
	rc = pen_torch_read(known->file, record, known->record, err);
	return rc ? rc : use_table(known, record, err);
}

int pen_torch_verifiable(const struct pen_torch *file)
{
	if (pen_torch_find(file, TORCH_TABLE))
		return PEN_TORCH_BY_TABLE;
	/* All records have one, or none; of the pickle, which has bytes, 0 is none. */
	return pen_torch_find(file, "data.pkl")->crc32 ? PEN_TORCH_BY_CRC32
						       : PEN_TORCH_BY_NOTHING;
}

/* ----------------------------------------------------------------------------- the check -- */

static bool has_digests(const struct pen_torch_record *record)
{
	return !(record->flags & PEN_TORCH_PACKED);
}

static int set_up(struct known *known, struct pen_error *err)
{
	int rc = read_table(known, err);

	if (rc || known->by == PEN_TORCH_BY_TABLE)
		return rc;
	known->by = pen_torch_find(known->file, "data.pkl")->crc32 ? PEN_TORCH_BY_CRC32
								   : PEN_TORCH_BY_NOTHING;
	known->table.chunk = TORCH_CHUNK;
	return 0;
}

/* Chunks that all tables consist of, cut where any record begins or ends. */
static int set_up_digests(struct pen_torch_check *check, const struct pen_options *options)
{
	struct pen_object *object = check->known[0].file->object;
	uint64_t chunk = CHUNK_MAX;
	size_t records = 0;

	for (size_t k = 0; k < check->count; k++) {
		if (chunk > check->known[k].table.chunk)
			chunk = check->known[k].table.chunk;
		records += check->known[k].file->record_count;
	}
	if (torch_digests_init(&check->digests, object, torch_chunk(options, chunk),
			       pen_object_size(object), 2 * records))
		return -ENOMEM;
	for (size_t k = 0; k < check->count; k++) {
		const struct pen_torch *file = check->known[k].file;

		for (size_t i = 0; i < file->record_count; i++)
			if (has_digests(&file->records[i]))
				torch_digests_cut(&check->digests, file->records[i].offset,
						  file->records[i].bytes);
	}
	return 0;
}

static void check_free(struct pen_torch_check *check)
{
	torch_digests_fini(&check->digests);
	for (size_t k = 0; k < check->count; k++)
		free(check->known[k].record);
	free(check);
}

int pen_torch_check_items(struct pen_torch *const *files, size_t count,
			  const struct pen_options *options, struct pen_torch_check **check,
			  struct pen_error *err)
{
	struct pen_torch_check *new;
	int rc = 0;

	*check = NULL;
	error_clear(err);
	if (!count)
		return error_set(err, -EINVAL, "verify", "a file", -1, "it has no items");
	for (size_t k = 1; k < count; k++)
		if (files[k]->object != files[0]->object ||
		    files[k]->base < files[k - 1]->base + files[k - 1]->size)
			return error_set(err, -EINVAL, "verify", files[k]->path, -1,
					 "its items are not in the order of offsets");
	new = os_calloc(1, sizeof(*new) + count * sizeof(new->known[0]));
	if (!new)
		return error_sys(err, -ENOMEM, "verify", files[0]->path, -1);
	new->count = count;
	for (size_t k = 0; !rc && k < count; k++) {
		new->known[k].file = files[k];
		rc = set_up(&new->known[k], err);
	}
	if (!rc && set_up_digests(new, options))
		rc = error_sys(err, -ENOMEM, "verify", files[0]->path, -1);
	if (rc)
		check_free(new);
	else
		*check = new;
	return rc;
}

int pen_torch_check_new(struct pen_torch *file, const struct pen_options *options,
			struct pen_torch_check **check, struct pen_error *err)
{
	return pen_torch_check_items(&file, 1, options, check, err);
}

const struct pen_digests *pen_torch_check_digests(const struct pen_torch_check *check)
{
	return &check->digests;
}

/* --------------------------------------------------------------------------- what is found -- */

/* The tensor that a byte of a storage belongs to; NULL where none does, or nobody can say. */
static const struct pen_torch_tensor *tensor_at(struct pen_torch *file, size_t record, uint64_t at)
{
	const struct pen_torch_tensor *tensors, *near = NULL;
	size_t count;

	if (pen_torch_tensors(file, &tensors, &count, NULL))
		return NULL;
	for (size_t i = 0; i < count; i++)
		if (tensors[i].record == record && tensors[i].bytes && tensors[i].offset <= at &&
		    (!near || tensors[i].offset > near->offset))
			near = &tensors[i];
	return near;
}

/* From `at` up to `stop` something is wrong in record `index`. */
static int mismatch(struct pen_torch *file, size_t index, uint64_t at, uint64_t stop,
		    struct pen_error *err)
{
	const struct pen_torch_record *record = &file->records[index];
	const struct pen_torch_tensor *tensor = tensor_at(file, index, at);
	char shown[WORDS_NAME], of[WORDS_NAME + 16] = "";

	if (!err)
		return -EILSEQ;
	if (tensor && tensor->name_length)
		snprintf(of, sizeof(of), ", tensor %s",
			 words_text(shown, tensor->name, tensor->name_length));
	error_vendor(err, -EILSEQ, PEN_DOMAIN_FORMAT, 0, "verify", file->path,
		     "record %.60s%s: the %llu bytes from here on are not those that were saved",
		     record->name, of, (unsigned long long)(stop - at));
	err->offset = (int64_t)at;
	error_hint(err, DAMAGED);
	return -EILSEQ;
}

/* The end of the chunk that holds `at`, in a record that ends at `end`. */
static uint64_t chunk_end(uint64_t chunk, uint64_t at, uint64_t end)
{
	return end - at < chunk - at % chunk ? end : at + (chunk - at % chunk);
}

struct seen {
	uint64_t crc32;
	bool whole;		/* all of it passed */
	uint64_t passed;	/* bytes of chunks of which anything passed */
};

/* What passed of [at, stop), which is one chunk of the table, in one or more of the digests. */
static struct seen look_at(const struct pen_digests *digests, uint64_t at, uint64_t stop)
{
	uint64_t index = torch_digests_first(digests, at), start = at, next;
	struct seen seen = { .whole = true };

	for (; at < stop; at = next, index++) {
		next = chunk_end(digests->chunk, at, stop);
		if (digests->states[index] != PEN_CHUNK_UNTOUCHED)
			seen.passed += next - at;
		if (digests->states[index] != PEN_CHUNK_DIGESTED)
			seen.whole = false;
		else if (at == start)
			seen.crc32 = digests->values[index];
		else
			seen.crc32 = digest_crc32_join(seen.crc32, digests->values[index],
						       next - at);
	}
	return seen;
}

/* `table` is where the digests of a storage begin in the table; NULL: it has none. */
static int check_record(const struct pen_digests *digests, const struct known *known,
			size_t index, const unsigned char *table,
			struct pen_torch_checked *checked, struct pen_error *err)
{
	const struct pen_torch_record *record = &known->file->records[index];
	uint64_t at = record->offset, end = at + record->bytes, next, passed = 0, right = 0;
	uint64_t crc32 = 0;
	bool whole = true;

	for (; at < end; at = next) {
		struct seen seen;

		next = chunk_end(known->table.chunk, at, end);
		seen = look_at(digests, at, next);
		passed += seen.passed;
		whole &= seen.whole;
		if (whole && record->crc32)
			crc32 = digest_crc32_join(crc32, seen.crc32, next - at);
		if (!table)
			continue;
		if (seen.whole && seen.crc32 != zip_get(table, 8))
			return mismatch(known->file, index, at, next, err);
		right += seen.whole ? next - at : 0;
		table += 8;
	}
	if (whole && record->crc32) {
		if (crc32 != record->crc32)
			return mismatch(known->file, index, record->offset, end, err);
		right = record->bytes;
	}
	checked->verified += right;
	checked->unverified += passed - right;
	return 0;
}

static int compare(const struct pen_digests *digests, const struct known *known,
		   struct pen_torch_checked *checked, struct pen_error *err)
{
	const struct pen_torch *file = known->file;
	const unsigned char *table = NULL;
	int rc = 0;

	if (known->by == PEN_TORCH_BY_TABLE)
		table = known->record + TORCH_TABLE_HEAD;
	for (size_t i = 0; !rc && i < file->record_count; i++) {
		const struct pen_torch_record *record = &file->records[i];
		bool storage = torch_is_storage(record);

		if (has_digests(record))
			rc = check_record(digests, known, i, storage ? table : NULL, checked,
					  err);
		if (storage && table)
			table += 8 * torch_chunks(known->table.chunk, record->offset,
						  record->bytes);
	}
	return rc;
}

int pen_torch_check_end(struct pen_torch_check *check, struct pen_torch_checked *checked,
			struct pen_error *err)
{
	struct pen_torch_checked found = PEN_TORCH_CHECKED_INIT;
	int rc = 0;

	error_clear(err);
	/* Of several, what the least has. */
	found.by = check->known[0].by;
	for (size_t k = 0; !rc && k < check->count; k++) {
		if (found.by > check->known[k].by)
			found.by = check->known[k].by;
		rc = compare(&check->digests, &check->known[k], &found, err);
	}
	check_free(check);
	/* A caller compiled against an older header has a shorter struct. */
	if (checked) {
		found.size = checked->size;
		memcpy(checked, &found,
		       checked->size < sizeof(found) ? checked->size : sizeof(found));
	}
	return rc;
}

/* ------------------------------------------------------------------------- the whole file -- */

static int read_through(struct pen_torch *file, struct pen_device *host,
			const struct pen_options *options, struct pen_error *err)
{
	uint64_t end = file->base + file->zip->directory, next;
	struct pen_extent extent = { .object = file->object };
	int rc = pen_device_alloc(host, WINDOW, &extent.memory, err);

	if (rc)
		return rc;
	for (uint64_t at = file->base; !rc && at < end; at = next) {
		next = end - at < WINDOW - at % WINDOW ? end : at + (WINDOW - at % WINDOW);
		extent.offset = at;
		extent.length = next - at;
		rc = pen_transfer(PEN_READ, host, &extent, 1, options, NULL, err);
	}
	pen_device_free(host, extent.memory, WINDOW, NULL);
	return rc;
}

int pen_torch_verify(struct pen_torch *file, const struct pen_options *options,
		     struct pen_torch_checked *checked, struct pen_error *err)
{
	struct pen_options own;
	struct pen_torch_check *check;
	struct pen_device *host;
	int rc;

	error_clear(err);
	rc = schedule_options(options, &own, err);
	if (!rc)
		rc = pen_torch_check_new(file, &own, &check, err);
	if (rc)
		return rc;
	own.digests = pen_torch_check_digests(check);
	own.digest_count = 1;
	rc = pen_device_open("host", &host, err);
	if (!rc) {
		rc = read_through(file, host, &own, err);
		pen_device_close(host);
	}
	if (rc) {
		check_free(check);
		return rc;
	}
	return pen_torch_check_end(check, checked, err);
}
