/* SPDX-License-Identifier: MIT */
/* From the header of a coded file to tables that hold; see coded.h. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "format/coded.h"
#include "format/words.h"
#include "io/object.h"
#include "sys/os.h"

#define PREFIX 8u	/* bytes that say how long a header is */
#define DAMAGED "The file is damaged, or was not made by Penstock: pack the model again"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tables are used as they lie in files");

enum planes_kind coded_kind(int dtype)
{
	switch (dtype) {
	case PEN_BF16:
		return PLANES_BF16;
	case PEN_F32:
		return PLANES_F32;
	case PEN_F16:
		return PLANES_F16;
	case PEN_F8_E4M3:
	case PEN_F8_E4M3FNUZ:
		return PLANES_E4M3;
	case PEN_F8_E5M2:
	case PEN_F8_E5M2FNUZ:
		return PLANES_E5M2;
	default:
		return PLANES_NONE;
	}
}

static int bad(const char *name, struct pen_error *err, const char *wrong)
{
	words_bad(err, name, -1, "%s", wrong);
	error_hint(err, DAMAGED);
	return -EBADMSG;
}

static int bad_tensor(const char *name, const struct pen_tensor *tensor, struct pen_error *err,
		      const char *wrong)
{
	char shown[WORDS_NAME];

	words_bad(err, name, (int64_t)tensor->offset, "tensor \"%s\" %s",
		  words_text(shown, tensor->name, tensor->name_length), wrong);
	error_hint(err, DAMAGED);
	return -EBADMSG;
}

int coded_damaged(const char *name, const struct pen_tensor *tensor, uint64_t number,
		  uint64_t offset, struct pen_error *err)
{
	char shown[WORDS_NAME];

	words_bad(err, name, (int64_t)offset,
		  "chunk %" PRIu64 " of tensor \"%s\" is not what was packed: its checksum differs",
		  number, words_text(shown, tensor->name, tensor->name_length));
	error_hint(err, "The file is damaged: take another copy of it, or pack the model again");
	return -EBADMSG;
}

/* -------------------------------------------------------------------------------- metadata -- */

static const struct pen_metadata *find_key(const struct safetensors *table, const char *key)
{
	for (size_t i = 0; i < table->metadata_count; i++) {
		const struct pen_metadata *pair = &table->metadata[i];

		if (pair->key_length == strlen(key) && !memcmp(pair->key, key, pair->key_length))
			return pair;
	}
	return NULL;
}

static int check_version(const char *name, const struct pen_metadata *version,
			 struct pen_error *err)
{
	char shown[WORDS_NAME];

	if (version->value_length == strlen(CODED_VERSION) &&
	    !memcmp(version->value, CODED_VERSION, version->value_length))
		return 0;
	words_bad(err, name, -1, "its coding is of version \"%s\", and this Penstock knows version "
		  CODED_VERSION, words_text(shown, version->value, version->value_length));
	error_hint(err, "Take a newer Penstock");
	return -EBADMSG;
}

/* Digits and nothing else, which strtoul() would let pass. */
static bool read_crc32(const struct pen_metadata *pair, uint32_t *crc32)
{
	*crc32 = 0;
	for (size_t i = 0; i < pair->value_length; i++) {
		static const char digits[] = "0123456789abcdefABCDEF";
		const char *found = memchr(digits, pair->value[i], sizeof(digits) - 1);
		size_t digit = found ? (size_t)(found - digits) : 0;

		if (!found)
			return false;
		*crc32 = *crc32 << 4 | (uint32_t)(digit < 16 ? digit : digit - 6);
	}
	return pair->value_length == 8;
}

static int read_numbers(const char *name, struct coded *coded, struct pen_error *err)
{
	const struct pen_metadata *header = find_key(coded->stored, CODED_KEY_HEADER);
	const struct pen_metadata *bytes = find_key(coded->stored, CODED_KEY_BYTES);
	const struct pen_metadata *crc32 = find_key(coded->stored, CODED_KEY_CRC32);

	if (!header || !bytes || !crc32)
		return bad(name, err, "its metadata say that it is coded, but not all of how");
	coded->header = header->value;
	coded->header_length = header->value_length;
	if (strlen(bytes->value) != bytes->value_length ||
	    text_to_number(bytes->value, INT64_MAX, &coded->bytes) ||
	    coded->bytes < PREFIX || coded->bytes - PREFIX < coded->header_length)
		return bad(name, err, CODED_KEY_BYTES " is not the size of a file");
	if (!read_crc32(crc32, &coded->crc32))
		return bad(name, err, CODED_KEY_CRC32 " is not of 8 hex digits");
	return 0;
}

/* --------------------------------------------------------------------------------- tensors -- */

/* Is it as it was? */
static bool same(const struct pen_tensor *stored, const struct pen_tensor *original)
{
	return stored->dtype == original->dtype && stored->rank == original->rank &&
	       !memcmp(stored->shape, original->shape, stored->rank * sizeof(stored->shape[0]));
}

/* Set what one tensor is here; `original` has its place in the original file until then. */
static int settle(const char *name, const struct pen_tensor *stored, struct pen_tensor *original,
		  struct coded_tensor *tensor, struct pen_error *err)
{
	*tensor = (struct coded_tensor){ .original = original->offset };
	original->offset = stored->offset;
	if (same(stored, original))
		return 0;
	tensor->kind = coded_kind(original->dtype);
	if (stored->dtype != PEN_U8 || stored->rank != 1 || tensor->kind == PLANES_NONE)
		return bad_tensor(name, stored, err, "is neither coded nor what the original "
				  "header says of it");
	if (stored->offset % PLANES_ALIGN)
		return bad_tensor(name, stored, err, "is coded and does not begin at a multiple of "
				  "16");
	/* Without bytes it would be taken for one that is not coded. */
	if (!stored->bytes != !original->bytes)
		return bad_tensor(name, stored, err, "is coded and has no bytes, here or in the "
				  "original");
	tensor->values = original->bytes / planes_shapes[tensor->kind].bytes;
	original->coded = stored->bytes;
	return 0;
}

static int order_of(const struct pen_tensor *a, const struct pen_tensor *b)
{
	return text_order(a->name, a->name_length, b->name, b->name_length);
}

static bool is_table(const struct pen_tensor *tensor)
{
	return tensor->name_length == strlen(CODED_TABLE) &&
	       !memcmp(tensor->name, CODED_TABLE, tensor->name_length);
}

/* Walk both headers side by side, sorted by name. */
static int match(const char *name, struct coded *coded, struct pen_error *err)
{
	const struct safetensors *stored = coded->stored, *table = coded->table;
	const struct pen_tensor *chunks = NULL;
	size_t next = 0;

	for (size_t i = 0; i < stored->count; i++) {
		const struct pen_tensor *here = stored->by_name[i];
		int rc;

		if (is_table(here)) {
			chunks = here;
			continue;
		}
		if (next == table->count || order_of(here, table->by_name[next]))
			return bad_tensor(name, here, err, "and those of the original header are "
					  "not the same");
		rc = settle(name, here, &table->tensors[table->by_name[next] - table->tensors],
			    &coded->tensors[table->by_name[next] - table->tensors], err);
		if (rc)
			return rc;
		next++;
	}
	if (next < table->count)
		return bad_tensor(name, table->by_name[next], err, "is not there, though the "
				  "original header has it");
	if (!chunks || chunks->dtype != PEN_U8 || chunks->offset % PLANES_ALIGN)
		return bad(name, err, "it has no table of chunks");
	coded->chunks_at = chunks->offset;
	coded->chunk_count = chunks->bytes / sizeof(struct planes_chunk);
	return chunks->bytes % sizeof(struct planes_chunk) ? bad(name, err, "its table of chunks "
								 "ends inside of one") : 0;
}

struct place {
	uint64_t offset, bytes;
	size_t number;
};

static int by_offset(const void *left, const void *right)
{
	const struct place *a = left, *b = right;

	if (a->offset != b->offset)
		return a->offset < b->offset ? -1 : 1;
	/* An empty tensor begins where the next one does, and lies before it. */
	if (!a->bytes != !b->bytes)
		return a->bytes ? 1 : -1;
	return a->number < b->number ? -1 : a->number > b->number;
}

/* Sort the tensors, and what is known of them, by where they lie here. */
static int sort(const char *name, struct coded *coded, struct pen_error *err)
{
	struct safetensors *table = coded->table;
	size_t count = table->count;
	struct place *places = os_calloc(count + 1, sizeof(places[0]));
	struct pen_tensor *tensors = os_calloc(count + 1, sizeof(tensors[0]));
	struct coded_tensor *known = os_calloc(count + 1, sizeof(known[0]));
	size_t *moved = coded->order = os_calloc(count + 1, sizeof(moved[0]));
	bool made = places && tensors && known && moved;

	for (size_t i = 0; made && i < count; i++)
		places[i] = (struct place){ table->tensors[i].offset, table->tensors[i].bytes, i };
	if (made && count)
		qsort(places, count, sizeof(places[0]), by_offset);
	for (size_t i = 0; made && i < count; i++) {
		tensors[i] = table->tensors[places[i].number];
		known[i] = coded->tensors[places[i].number];
		moved[places[i].number] = i;
	}
	for (size_t i = 0; made && i < count; i++)
		table->by_name[i] = table->tensors + moved[table->by_name[i] - table->tensors];
	if (made && count) {
		memcpy(table->tensors, tensors, count * sizeof(tensors[0]));
		memcpy(coded->tensors, known, count * sizeof(known[0]));
	}
	free(places);
	free(tensors);
	free(known);
	return made ? 0 : error_sys(err, -ENOMEM, "read", name, -1);
}

/* Each tensor's chunks follow those of the one before. */
static int number_chunks(const char *name, struct coded *coded, struct pen_error *err)
{
	uint64_t first = 0;

	for (size_t i = 0; i < coded->table->count; i++) {
		coded->tensors[i].first = first;
		if (coded->tensors[i].kind == PLANES_NONE)
			continue;
		first += planes_chunk_count(coded->tensors[i].values);
		if (first > coded->chunk_count)
			return bad_tensor(name, &coded->table->tensors[i], err,
					  "has chunks that the table of chunks does not have");
	}
	return first == coded->chunk_count ? 0
		: bad(name, err, "its table has chunks that no tensor has");
}

void coded_free(struct coded *coded)
{
	if (!coded)
		return;
	free(coded->stored);
	free(coded->table);
	free(coded->tensors);
	free(coded->order);
	free(coded);
}

static int make(const char *name, struct coded *coded, struct pen_error *err)
{
	int rc = read_numbers(name, coded, err);

	if (!rc)
		rc = safetensors_parse(name, coded->header, coded->header_length, coded->bytes,
				       &coded->table, err);
	if (rc)
		return rc;
	coded->table->data = coded->stored->data;
	coded->tensors = os_calloc(coded->table->count + 1, sizeof(coded->tensors[0]));
	if (!coded->tensors)
		return error_sys(err, -ENOMEM, "read", name, -1);
	rc = match(name, coded, err);
	if (!rc)
		rc = sort(name, coded, err);
	return rc ? rc : number_chunks(name, coded, err);
}

int coded_read(const char *name, struct safetensors *stored, struct coded **coded,
	       struct pen_error *err)
{
	const struct pen_metadata *version = find_key(stored, CODED_KEY_VERSION);
	int rc;

	*coded = NULL;
	if (!version)
		return 0;
	rc = check_version(name, version, err);
	if (rc)
		return rc;
	*coded = os_calloc(1, sizeof(**coded));
	if (!*coded)
		return error_sys(err, -ENOMEM, "read", name, -1);
	(*coded)->stored = stored;
	rc = make(name, *coded, err);
	if (rc) {
		(*coded)->stored = NULL;
		coded_free(*coded);
		*coded = NULL;
	}
	return rc;
}

/* ---------------------------------------------------------------------------------- chunks -- */

void coded_chunks_fini(struct coded_chunks *chunks)
{
	free(chunks->chunks);
	free(chunks->offsets);
	*chunks = (struct coded_chunks){ .chunks = NULL };
}

int coded_chunks_check(const struct coded *coded, const char *name, size_t number,
		       struct coded_chunks *chunks, struct pen_error *err)
{
	const struct pen_tensor *tensor = &coded->table->tensors[number];
	const struct coded_tensor *known = &coded->tensors[number];
	uint64_t count = planes_chunk_count(known->values), at = tensor->offset;

	for (uint64_t i = 0; i < count; i++) {
		const struct planes_chunk *chunk = &chunks->chunks[known->first + i];

		if (!planes_check(known->kind, planes_chunk_values(known->values, i), chunk))
			return bad_tensor(name, tensor, err, "has a chunk that contradicts itself "
					  "in the table of chunks");
		chunks->offsets[known->first + i] = at;
		at += chunk->bytes;
	}
	return at - tensor->offset == tensor->coded ? 0
		: bad_tensor(name, tensor, err, "has not the size that its chunks have");
}

int coded_chunks_read(const struct coded *coded, struct pen_object *object, size_t tensor,
		      size_t count, struct coded_chunks *chunks, struct pen_error *err)
{
	const struct coded_tensor *from = &coded->tensors[tensor];
	uint64_t first = from->first;
	uint64_t end = tensor + count < coded->table->count ? from[count].first
							    : coded->chunk_count;
	int rc;

	if (!chunks->chunks) {
		chunks->chunks = os_calloc((size_t)coded->chunk_count + 1,
					   sizeof(chunks->chunks[0]));
		chunks->offsets = os_calloc((size_t)coded->chunk_count + 1,
					    sizeof(chunks->offsets[0]));
		if (!chunks->chunks || !chunks->offsets) {
			coded_chunks_fini(chunks);
			return error_sys(err, -ENOMEM, "read", object->name, -1);
		}
	}
	rc = object_read(object, chunks->chunks + first,
			 (size_t)(end - first) * sizeof(chunks->chunks[0]),
			 coded->chunks_at + first * sizeof(chunks->chunks[0]), err);
	for (size_t i = tensor; !rc && i < tensor + count; i++)
		if (coded->tensors[i].kind != PLANES_NONE)
			rc = coded_chunks_check(coded, object->name, i, chunks, err);
	return rc;
}
