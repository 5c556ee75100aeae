/* SPDX-License-Identifier: MIT */
/* What is true of every input of the parsers; see fuzz_format.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/text.h"
#include "format/coded.h"
#include "format/index.h"
#include "format/manifest.h"
#include "format/pickle.h"
#include "format/safetensors.h"
#include "format/zip.h"
#include "fuzz_format.h"

#define NAME "fuzzed"

unsigned long fuzz_accepted;

#define MUST(condition)                                                                 \
	do {                                                                            \
		if (!(condition)) {                                                     \
			fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__,    \
				#condition);                                            \
			abort();                                                        \
		}                                                                       \
	} while (0)

static void check_words(int rc, const struct pen_error *err)
{
	char shown[4096];

	MUST(rc < 0 && err->code == rc);
	MUST(err->domain == PEN_DOMAIN_FORMAT && err->raw == 0);
	MUST(!strcmp(err->object, NAME) && err->operation[0]);
	MUST(err->message[0] && err->hint[0] && err->offset >= -1);
	/* Names are in it as they are; shown, nothing in them is obeyed. */
	pen_error_format(err, shown, sizeof(shown));
	for (const char *at = shown; *at; at++)
		MUST((unsigned char)*at >= 0x20 && *at != 0x7f);
}

struct text {
	const char *bytes;
	size_t length;
};

static int by_text(const void *left, const void *right)
{
	const struct text *a = left, *b = right;

	return text_order(a->bytes, a->length, b->bytes, b->length);
}

static void check_unique(struct text *texts, size_t count)
{
	for (size_t i = 0; i < count; i++)
		MUST(!texts[i].bytes[texts[i].length]);
	qsort(texts, count, sizeof(texts[0]), by_text);
	for (size_t i = 1; i < count; i++)
		MUST(by_text(&texts[i - 1], &texts[i]));
}

static void check_tensor(const struct pen_tensor *tensor)
{
	unsigned __int128 bits = pen_dtype_bits(tensor->dtype);

	MUST(pen_dtype_name(tensor->dtype));
	for (uint32_t i = 0; i < tensor->rank; i++)
		bits *= tensor->shape[i];
	MUST(bits == (unsigned __int128)tensor->bytes * 8);
}

static void check_metadata(const struct safetensors *table, size_t header)
{
	struct text *keys = calloc(table->metadata_count + 1, sizeof(keys[0]));

	MUST(keys && (table->metadata || !table->metadata_count));
	for (size_t i = 0; i < table->metadata_count; i++) {
		const struct pen_metadata *pair = &table->metadata[i];

		keys[i] = (struct text){ pair->key, pair->key_length };
		MUST(pair->value_length <= header && !pair->value[pair->value_length]);
	}
	check_unique(keys, table->metadata_count);
	free(keys);
}

static void check_table(const struct safetensors *table, size_t header, uint64_t file_size)
{
	struct text *names = calloc(table->count + 1, sizeof(names[0]));
	uint64_t next = 8 + header;

	MUST(names && table->data == next);
	for (size_t i = 0; i < table->count; i++) {
		const struct pen_tensor *tensor = &table->tensors[i];

		MUST(tensor->offset == next && tensor->file == 0);
		check_tensor(tensor);
		next += tensor->bytes;
		MUST(next <= file_size);
		names[i] = (struct text){ tensor->name, tensor->name_length };
	}
	MUST(next == file_size);
	check_unique(names, table->count);
	for (size_t i = 0; i < table->count; i++)
		MUST(names[i].bytes == table->by_name[i]->name);
	free(names);
	check_metadata(table, header);
}

/* A copy of just its size, so that a step too far is seen. */
static void *exact(const void *bytes, size_t size)
{
	void *copy = malloc(size ? size : 1);

	MUST(copy);
	if (size)
		memcpy(copy, bytes, size);
	return copy;
}

static void one_file(const uint8_t *bytes, size_t size, uint64_t file_size)
{
	struct safetensors *table;
	struct pen_error err;
	size_t length;
	void *header, *first = exact(bytes, size < 8 ? size : 8);
	int rc = safetensors_header_length(NAME, first, file_size, &length, &err);

	free(first);
	if (rc) {
		check_words(rc, &err);
		return;
	}
	if (length > size - 8)
		return;
	header = exact(bytes + 8, length);
	rc = safetensors_parse(NAME, header, length, file_size, &table, &err);
	free(header);
	if (rc) {
		check_words(rc, &err);
		MUST(!table);
		return;
	}
	check_table(table, length, file_size);
	fuzz_accepted++;
	free(table);
}

/* Every chunk that passes is decoded, from memory and into memory of just its size. */
static void decode_chunks(const uint8_t *bytes, size_t size, const struct coded *coded,
			  const struct coded_tensor *known, const struct coded_chunks *chunks)
{
	uint64_t count = planes_chunk_count(known->values);

	for (uint64_t i = 0; i < count; i++) {
		const struct planes_chunk *chunk = &chunks->chunks[known->first + i];
		uint64_t at = chunks->offsets[known->first + i];
		uint32_t values = planes_chunk_values(known->values, i);
		void *stored, *decoded = malloc(values * planes_shapes[known->kind].bytes);

		MUST(known->first + i < coded->chunk_count && decoded);
		MUST(at <= size && chunk->bytes <= size - at);
		/* Kernels have room for the planes of a chunk that is smaller coded than plain. */
		MUST(chunk->bytes <= planes_plain(known->kind, values));
		stored = exact(bytes + at, chunk->bytes);
		fuzz_accepted += planes_decode(known->kind, stored, chunk, values, decoded);
		free(stored);
		free(decoded);
	}
}

static void check_coded(const uint8_t *bytes, size_t size, const struct coded *coded)
{
	struct coded_chunks chunks = {
		.chunks = exact(bytes + coded->chunks_at,
				(size_t)coded->chunk_count * sizeof(chunks.chunks[0])),
		.offsets = calloc((size_t)coded->chunk_count + 1, sizeof(chunks.offsets[0])),
	};
	struct pen_error err;

	MUST(chunks.offsets);
	for (size_t i = 0; i < coded->table->count; i++) {
		const struct pen_tensor *tensor = &coded->table->tensors[i];
		int rc = 0;

		check_tensor(tensor);
		MUST(!i || tensor[-1].offset <= tensor->offset);
		MUST(coded->tensors[i].kind || !tensor->coded);
		if (coded->tensors[i].kind)
			rc = coded_chunks_check(coded, NAME, i, &chunks, &err);
		if (rc)
			check_words(rc, &err);
		else if (coded->tensors[i].kind)
			decode_chunks(bytes, size, coded, &coded->tensors[i], &chunks);
	}
	coded_chunks_fini(&chunks);
}

static void one_coded(const uint8_t *bytes, size_t size)
{
	struct safetensors *table;
	struct coded *coded;
	struct pen_error err;
	size_t length;
	int rc = safetensors_header_length(NAME, bytes, size, &length, &err);

	if (!rc)
		rc = safetensors_parse(NAME, bytes + 8, length, size, &table, &err);
	if (rc)
		return;		/* which is what one_file() is for */
	rc = coded_read(NAME, table, &coded, &err);
	if (rc)
		check_words(rc, &err);
	MUST(!rc || !coded);
	if (coded)
		check_coded(bytes, size, coded);
	else
		free(table);
	coded_free(coded);
}

static void check_index(const struct index *index)
{
	for (size_t i = 0; i < index->count; i++) {
		MUST(index->entries[i].file < index->file_count);
		MUST(!index->entries[i].tensor[index->entries[i].length]);
		MUST(!i || text_order(index->entries[i - 1].tensor, index->entries[i - 1].length,
				      index->entries[i].tensor, index->entries[i].length) < 0);
	}
	for (size_t i = 0; i < index->file_count; i++) {
		char around[4096];

		MUST(!i || strcmp(index->files[i - 1], index->files[i]) < 0);
		MUST(index->files[i][0]);
		/* Slashes around make of every bad part the same text. */
		if (snprintf(around, sizeof(around), "/%s/", index->files[i]) >= 4096)
			continue;
		MUST(!strstr(around, "//") && !strstr(around, "/./") && !strstr(around, "/../"));
	}
	MUST(!index->file_count == !index->count);
}

static void one_index(const uint8_t *bytes, size_t size)
{
	struct index *index;
	struct pen_error err;
	void *text = exact(bytes, size);
	int rc = index_parse(NAME, text, size, &index, &err);

	free(text);
	if (rc) {
		check_words(rc, &err);
		MUST(!index);
		return;
	}
	check_index(index);
	fuzz_accepted++;
	free(index);
}

/* Records one after the other, none of them over another's bytes. */
static void check_zip(const struct zip *zip)
{
	struct text *names = calloc(zip->count, sizeof(names[0]));
	uint64_t next = 0;

	MUST(names && zip->count && !zip->entries[0].header && zip->first < zip->count);
	for (size_t i = 0; i < zip->count; i++) {
		const struct zip_entry *entry = &zip->entries[i];

		MUST(entry->header >= next && entry->offset > entry->header);
		next = entry->offset + entry->bytes;
		MUST(next >= entry->offset && next <= zip->directory);
		MUST(entry->method || entry->bytes == entry->unpacked);
		MUST(strlen(entry->name) == entry->name_length && entry->name_length);
		names[i] = (struct text){ entry->name, entry->name_length };
	}
	check_unique(names, zip->count);
	free(names);
}

static int read_headers(const uint8_t *bytes, struct zip *zip, struct pen_error *err)
{
	int rc = 0;

	for (size_t i = 0; !rc && i < zip->count; i++) {
		void *local = exact(bytes + zip->entries[i].header, zip_local_length(zip, i));

		rc = zip_check_local(NAME, zip, i, local, err);
		free(local);
	}
	return rc;
}

static void one_zip(const uint8_t *bytes, size_t size)
{
	size_t length = size < ZIP_TAIL ? size : ZIP_TAIL;
	void *part = exact(bytes + size - length, length);
	struct zip *zip = NULL;
	struct pen_error err;
	struct zip_end end;
	int rc = zip_find_end(NAME, part, length, size, &end, &err);

	free(part);
	if (!rc) {
		MUST(end.directory <= size && end.length <= size - end.directory);
		part = exact(bytes + end.directory, (size_t)end.length);
		rc = zip_parse(NAME, part, &end, &zip, &err);
		MUST(!rc == !!zip);
		free(part);
	}
	if (!rc)
		rc = read_headers(bytes, zip, &err);
	if (rc) {
		check_words(rc, &err);
	} else {
		check_zip(zip);
		fuzz_accepted++;
	}
	free(zip);
}

static void one_pickle(const uint8_t *bytes, size_t size)
{
	void *copy = exact(bytes, size);
	struct pickle pickle;
	struct pen_error err;
	int rc = pickle_init(&pickle, NAME, copy, size, 0, &err);

	free(copy);
	for (size_t i = 0; !rc && i < pickle.count; i++) {
		const struct pickle_tensor *tensor = &pickle.tensors[i];
		uint64_t sum = 0;

		MUST(!tensor->name[tensor->name_length] && !tensor->key[tensor->key_length]);
		MUST(tensor->dtype->bits && tensor->rank <= 64 && tensor->at <= size);
		for (uint32_t j = 0; j < tensor->rank; j++)
			sum |= tensor->shape[j] | tensor->stride[j];
		MUST(sum <= INT64_MAX && tensor->offset <= INT64_MAX);
	}
	if (rc)
		check_words(rc, &err);
	else
		fuzz_accepted++;
	pickle_fini(&pickle);
}

/* Files are those of the ranks, in the step's own folder; what is accepted can be written again. */
static void check_manifest(const struct pen_checkpoint *made)
{
	struct pen_error err;
	uint64_t bytes = 0;
	uint32_t rank, turn;
	size_t size;
	char *text;

	MUST(made->file_count == made->world_size && made->world_size);
	MUST(strlen(made->time) == 20 && !made->user[made->user_length]);
	for (size_t i = 0; i < made->file_count; i++) {
		MUST(manifest_file_parse(made->files[i].name, &rank, &turn) && rank == i);
		MUST(!strchr(made->files[i].name, '/') && strlen(made->files[i].digest) == 21);
		bytes += made->files[i].bytes;
	}
	MUST(bytes == made->bytes && bytes <= INT64_MAX);
	MUST(!manifest_write(made, &text, &size, &err));
	free(text);
}

static void one_manifest(const uint8_t *bytes, size_t size)
{
	struct pen_checkpoint *made;
	struct pen_error err;
	void *text = exact(bytes, size);
	int rc = manifest_parse(NAME, text, size, 7, &made, &err);

	free(text);
	if (rc) {
		check_words(rc, &err);
		MUST(!made);
		return;
	}
	check_manifest(made);
	fuzz_accepted++;
	free(made);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	if (!size)
		return 0;
	switch (bytes[0]) {
	case 'i':
		one_index(bytes + 1, size - 1);
		return 0;
	case 'c':
		one_coded(bytes + 1, size - 1);
		return 0;
	case 'z':
		one_zip(bytes + 1, size - 1);
		return 0;
	case 'p':
		one_pickle(bytes + 1, size - 1);
		return 0;
	case 'm':
		one_manifest(bytes + 1, size - 1);
		return 0;
	}
	one_file(bytes + 1, size - 1, size - 1);
	/* The same header in a file of another size: without its data, and with gigabytes. */
	if (bytes[0] == 'l' && size > 8)
		one_file(bytes + 1, size - 1, (uint64_t)size - 1 + (1ull << 40));
	return 0;
}
