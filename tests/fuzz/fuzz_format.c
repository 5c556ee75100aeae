/* SPDX-License-Identifier: MIT */
/* What is true of every input of the parsers; see fuzz_format.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "format/index.h"
#include "format/safetensors.h"
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
	char text[8 * sizeof(*err)];

	MUST(rc < 0 && err->code == rc);
	MUST(err->domain == PEN_DOMAIN_FORMAT && err->raw == 0);
	MUST(!strcmp(err->object, NAME) && err->operation[0]);
	MUST(err->message[0] && err->hint[0] && err->offset >= -1);
	/* Names in it are as they are in the file; what people are shown of them is not. */
	MUST(pen_error_format(err, text, sizeof(text)) == (int)strlen(text));
	for (const char *at = text; *at; at++)
		MUST((unsigned char)*at >= 0x20 && *at != 0x7f);
}

static int by_text(const void *left, const void *right)
{
	return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static void check_unique(const char **names, size_t count)
{
	qsort(names, count, sizeof(names[0]), by_text);
	for (size_t i = 1; i < count; i++)
		MUST(strcmp(names[i - 1], names[i]));
}

static void check_tensor(const struct pen_tensor *tensor)
{
	unsigned __int128 bits = pen_dtype_bits(tensor->dtype);

	MUST(pen_dtype_name(tensor->dtype));
	for (uint32_t i = 0; i < tensor->rank; i++)
		bits *= tensor->shape[i];
	MUST(bits == (unsigned __int128)tensor->bytes * 8);
}

static void check_table(const struct safetensors *table, size_t header, uint64_t file_size)
{
	const char **names = calloc(table->count + 1, sizeof(names[0]));
	uint64_t next = 8 + header;

	MUST(names && table->data == next);
	for (size_t i = 0; i < table->count; i++) {
		const struct pen_tensor *tensor = &table->tensors[i];

		MUST(tensor->offset == next && tensor->file == 0);
		check_tensor(tensor);
		next += tensor->bytes;
		MUST(next <= file_size);
		names[i] = tensor->name;
	}
	MUST(next == file_size);
	check_unique(names, table->count);
	free(names);
	names = calloc(table->metadata_count + 1, sizeof(names[0]));
	for (size_t i = 0; i < table->metadata_count; i++) {
		names[i] = table->metadata[i].key;
		MUST(strlen(table->metadata[i].value) <= header);
	}
	check_unique(names, table->metadata_count);
	free(names);
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

static void check_index(const struct index *index)
{
	for (size_t i = 0; i < index->count; i++) {
		MUST(index->entries[i].file < index->file_count);
		MUST(!i || strcmp(index->entries[i - 1].tensor, index->entries[i].tensor) < 0);
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

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	if (!size)
		return 0;
	if (bytes[0] == 'i') {
		one_index(bytes + 1, size - 1);
		return 0;
	}
	one_file(bytes + 1, size - 1, size - 1);
	/* The same header in a file of another size: without its data, and with gigabytes. */
	if (bytes[0] == 'l' && size > 8)
		one_file(bytes + 1, size - 1, (uint64_t)size - 1 + (1ull << 40));
	return 0;
}
