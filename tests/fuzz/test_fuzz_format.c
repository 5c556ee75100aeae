/* SPDX-License-Identifier: MIT */
/*
 * The saved inputs of the fuzzer, and tens of thousands of mutations of them that are the same in
 * every run. This is no replacement for fuzzing, which knows what code an input reached, but it
 * runs everywhere and keeps what fuzzing found. To fuzz:
 *
 *	CC=clang-19 meson setup build-fuzz -Db_sanitize=address,undefined -Db_lundef=false \
 *		-Dc_args=-fsanitize=fuzzer-no-link && ninja -C build-fuzz libpenstock-all.a
 *	clang-19 -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -Iinclude -Isrc \
 *		tests/fuzz/fuzz_format.c build-fuzz/libpenstock-all.a -luring -lz -o fuzz && \
 *		./fuzz tests/fuzz/corpus
 */
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include "fuzz_format.h"
#include "test.h"

#define INPUT_MAX (64u << 10)
#define INPUTS_MAX 1000
#define MUTATIONS (TEST_SLOW_BUILD ? 20000 : 60000)

static struct input {
	char name[256];
	uint8_t *bytes;
	size_t size;
} inputs[INPUTS_MAX];
static size_t input_count;

static int by_name(const void *left, const void *right)
{
	return strcmp(((const struct input *)left)->name, ((const struct input *)right)->name);
}

static void read_corpus(void)
{
	DIR *folder = opendir(FUZZ_CORPUS);

	CHECK(folder != NULL);
	for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
		struct input *input = &inputs[input_count];
		char path[1000];
		FILE *file;

		if (entry->d_name[0] == '.')
			continue;
		CHECK(input_count < INPUTS_MAX);
		snprintf(input->name, sizeof(input->name), "%s", entry->d_name);
		snprintf(path, sizeof(path), "%s/%s", FUZZ_CORPUS, input->name);
		file = fopen(path, "rb");
		input->bytes = malloc(INPUT_MAX);
		CHECK(file && input->bytes);
		input->size = fread(input->bytes, 1, INPUT_MAX, file);
		fclose(file);
		input_count++;
	}
	closedir(folder);
	/* A directory has no order of its own; the mutations shall always be the same. */
	qsort(inputs, input_count, sizeof(inputs[0]), by_name);
	CHECK(input_count > 20);
}

static uint64_t seed = 1;

static size_t chance(size_t below)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return below ? (size_t)(seed >> 33) % below : 0;
}

/* Pieces of which headers are made. */
static const char *const pieces[] = {
	"\"", "{", "}", "[", "]", ",", ":", "0", "1", "-1", "8", "64", "9223372036854775807",
	"\\u0000", "\\ud800", "null", "\"dtype\"", "\"shape\"", "\"data_offsets\"", "\"F32\"",
	"\"F4\"", "\"U8\"", "\"__metadata__\"", "\"weight_map\"", "..", "/", "./", " ", "\xff",
	"\xe2\x82\xac", "1e9", "[]", "{}",
	"\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
	"\"a\":[\"U8\",[0],[0,0]]", "{\"U8\":null}", "18446744073709551615",
	"\"files\"", "\"user\"", "\"step\"", "\"bytes\"", "\"rank-00000.1.pt\"", "7",
	/* And zips and pickles. */
	"PK\3\4", "PK\1\2", "PK\5\6", "\xff\xff\xff\xff", "ctorch._utils\n_rebuild_tensor_v2\n",
	"(", ")", "t", "R", "Q", "K\1", "q\1", "h\1", "]a", "e", "s", "u", "b", "\x85", "\x86",
};

static size_t put(uint8_t *bytes, size_t size, size_t at, const void *piece, size_t length,
		  size_t over)
{
	if (over > size - at)
		over = size - at;
	if (size - over + length > INPUT_MAX)
		return size;
	memmove(bytes + at + length, bytes + at + over, size - at - over);
	memcpy(bytes + at, piece, length);
	return size - over + length;
}

/* One small change behind the byte that says what the input is. */
static size_t mutate(uint8_t *bytes, size_t size)
{
	size_t at = 1 + chance(size);
	const struct input *other;
	const char *piece;
	size_t from;

	if (at > size)
		at = size;
	switch (chance(7)) {
	case 0:
		if (at < size)
			bytes[at] ^= (uint8_t)(1u << chance(8));
		return size;
	case 1:
		return put(bytes, size, at, "", 0, 1 + chance(8));
	case 2:
		if (at < size && bytes[at] >= '0' && bytes[at] <= '9')
			bytes[at] = (uint8_t)('0' + chance(10));
		return size;
	case 3:
		other = &inputs[chance(input_count)];
		from = chance(other->size);
		return put(bytes, size, at, other->bytes + from, chance(other->size - from), 0);
	case 4:
		return at > 1 ? at : size;
	default:
		piece = pieces[chance(sizeof(pieces) / sizeof(pieces[0]))];
		return put(bytes, size, at, piece, strlen(piece), chance(2) * strlen(piece));
	}
}

/* The length in front of a header, set to what is there: else most changes end at that. */
static void mend_length(uint8_t *bytes, size_t size)
{
	uint64_t length = 0;

	if (size < 10 || strchr("izpm", bytes[0]))
		return;
	for (size_t i = 9, depth = 0; i < size; i++) {
		depth += bytes[i] == '{';
		if (bytes[i] == '}' && depth-- <= 1) {
			length = i - 8;
			break;
		}
	}
	for (int i = 0; i < 8; i++)
		bytes[1 + i] = (uint8_t)(length >> (8 * i));
}

TEST(saved_inputs)
{
	read_corpus();
	for (size_t i = 0; i < input_count; i++)
		LLVMFuzzerTestOneInput(inputs[i].bytes, inputs[i].size);
	CHECK(fuzz_accepted > 10);
	CHECK(fuzz_accepted < 2 * input_count);
}

TEST(mutations_of_them)
{
	uint8_t *bytes = malloc(INPUT_MAX);

	CHECK(bytes != NULL);
	read_corpus();
	for (unsigned int n = 0; n < MUTATIONS; n++) {
		const struct input *input = &inputs[n % input_count];
		size_t size = input->size;

		memcpy(bytes, input->bytes, size);
		for (size_t changes = 1 + chance(4); changes; changes--)
			size = size ? mutate(bytes, size) : size;
		if (chance(4))
			mend_length(bytes, size);
		LLVMFuzzerTestOneInput(bytes, size);
	}
	printf("%lu accepted\n", fuzz_accepted);
	CHECK(fuzz_accepted > MUTATIONS / 200);
	free(bytes);
}

TEST_MAIN
