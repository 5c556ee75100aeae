/* SPDX-License-Identifier: MIT */
/*
 * The coding of numbers: all bits come back, from every kind of number, by every code that the CPU
 * can run, and all of them store the same bytes. What is damaged is found; what is hostile stays in
 * its bounds, which the buffers here are cut to.
 */
#include <stdint.h>
#include "base/planes_code.h"
#include "test.h"

static uint64_t seed = 1;

static uint32_t random_number(void)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(seed >> 32);
}

/* A buffer of just its size, so that a step too far is seen. */
static void *exact(const void *bytes, size_t size)
{
	void *copy = malloc(size ? size : 1);

	CHECK(copy);
	if (size)
		memcpy(copy, bytes, size);
	return copy;
}

/* ---------------------------------------------------------------------------------- numbers -- */

/* A symbol as weights have them, halved in frequency with each step down from `top`. */
static uint32_t few_symbols(unsigned int top)
{
	uint32_t chance = random_number();

	return chance ? (top - (uint32_t)__builtin_clz(chance)) & 0xff : 0;
}

enum look {
	WEIGHTS,	/* few exponents */
	NOISE,		/* any bits */
	SAME,		/* one value */
	ZEROS,
	STEPS,		/* every value of 16 bits after the other */
	SPECIAL,	/* infinities, NaNs with payloads, subnormals, negative zeros */
	LOOKS,
};

static uint32_t number(const struct planes_shape *shape, enum look look, uint32_t i)
{
	uint32_t exponents = (1u << shape->symbol) - 1, exponent = 0;
	uint32_t rest = random_number();

	switch (look) {
	case NOISE:
		return rest;
	case SAME:
		return 0x3f81bf81;
	case ZEROS:
		return 0;
	case STEPS:
		return i * (shape->bytes == 4 ? 65537 : 1);
	case WEIGHTS:
		exponent = few_symbols(exponents * 3 / 4) & exponents;
		break;
	case SPECIAL:
		exponent = i % 2 ? exponents : 0;
		rest = i % 3 ? rest : 0;
		break;
	default:
		break;
	}
	return (rest & 1) << (shape->mantissa + shape->symbol) | exponent << shape->mantissa |
	       (rest >> 1 & ((1u << shape->mantissa) - 1));
}

static void fill(enum planes_kind kind, enum look look, void *values, uint32_t count)
{
	const struct planes_shape *shape = &planes_shapes[kind];

	for (uint32_t i = 0; i < count; i++) {
		uint32_t bits = number(shape, look, i);

		memcpy((char *)values + (size_t)i * shape->bytes, &bits, shape->bytes);
	}
}

/* ------------------------------------------------------------------------------------ cases -- */

static const uint32_t counts[] = {
	0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 100, 255, 1000, 4095, 16383, 16384,
};
#define COUNTS (sizeof(counts) / sizeof(counts[0]))

static void round_trip(enum planes_kind kind, enum look look, uint32_t count)
{
	size_t bytes = (size_t)count * planes_shapes[kind].bytes;
	const struct planes_code *codes[PLANES_CODES];
	size_t code_count = planes_usable(codes);
	/* At an odd address: tensors lie where files have them. */
	unsigned char *room = malloc(bytes + 1), *values = room + 1, *first = NULL;
	struct planes_chunk chunk, first_chunk;

	CHECK(room);
	fill(kind, look, values, count);
	for (size_t i = 0; i < code_count; i++) {
		unsigned char *stored = malloc(planes_plain(kind, count) + 1);
		unsigned char *back = malloc(bytes + 1);

		CHECK(stored && back);
		codes[i]->encode(kind, values, count, stored, &chunk);
		CHECK(planes_check(kind, count, &chunk));
		CHECK(chunk.bytes <= planes_plain(kind, count));
		CHECK(chunk.bytes % PLANES_ALIGN == 0);
		if (first) {
			CHECK(!memcmp(&chunk, &first_chunk, sizeof(chunk)));
			CHECK(!memcmp(stored, first, chunk.bytes));
		} else {
			first = exact(stored, chunk.bytes);
			first_chunk = chunk;
		}
		CHECK(codes[i]->decode(kind, first, &chunk, count, back + 1));
		CHECK(!memcmp(back + 1, values, bytes));
		free(stored);
		free(back);
	}
	free(first);
	free(room);
}

TEST(every_bit_comes_back_from_every_kind_of_number)
{
	for (enum planes_kind kind = PLANES_BF16; kind < PLANES_KINDS; kind++)
		for (enum look look = WEIGHTS; look < LOOKS; look++)
			for (size_t i = 0; i < COUNTS; i++)
				round_trip(kind, look, counts[i]);
}

static double ratio(enum planes_kind kind, enum look look)
{
	uint32_t bytes = PLANES_CHUNK * planes_shapes[kind].bytes;
	void *values = malloc(bytes), *stored = malloc(PLANES_ROOM);
	struct planes_chunk chunk;

	CHECK(values && stored);
	fill(kind, look, values, PLANES_CHUNK);
	planes_encode(kind, values, PLANES_CHUNK, stored, &chunk);
	free(values);
	free(stored);
	return (double)chunk.bytes / bytes;
}

TEST(weights_get_smaller_and_noise_does_not_grow)
{
	/* The symbols have 2 bits of entropy; planes take 2.4 at most. */
	CHECK(ratio(PLANES_BF16, WEIGHTS) < (8 + 2.4) / 16 + 0.002);
	CHECK(ratio(PLANES_F32, WEIGHTS) < (24 + 2.4) / 32 + 0.002);
	CHECK(ratio(PLANES_F16, WEIGHTS) < (11 + 2.4) / 16 + 0.002);
	CHECK(ratio(PLANES_E4M3, WEIGHTS) < (4 + 2.4) / 8 + 0.004);
	CHECK(ratio(PLANES_E5M2, WEIGHTS) < (3 + 2.4) / 8 + 0.004);
	for (enum planes_kind kind = PLANES_BF16; kind < PLANES_KINDS; kind++)
		CHECK(ratio(kind, NOISE) <= 1);
}

/* From the page: parts in their order, of 16 bytes each. */
TEST(parts_of_a_chunk_lie_where_the_page_says)
{
	static const uint16_t escapes[3] = { 65, 43, 17 };
	struct planes_parts parts;

	planes_parts(PLANES_F16, 100, escapes, &parts);
	CHECK(parts.rest[0] == 16 && parts.rest[1] == 16 + 112 && parts.rest[2] == 128 + 32);
	CHECK(parts.a == 160 + 16 && parts.b == 176 + 32 && parts.c == 208 + 32);
	CHECK(parts.d == 240 + 32 && parts.end == 272 + 32);
}

TEST(the_checksum_is_the_one_of_the_page)
{
	static const unsigned char bytes[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9 };
	static const uint32_t words[] = { 0x04030201, 0x08070605, 9 };
	uint32_t sum = 0;

	for (uint32_t i = 0; i < 3; i++) {
		uint32_t x = words[i] + i * 0x9e3779b1u;

		x = (x ^ x >> 16) * 0x85ebca6bu;
		x = (x ^ x >> 13) * 0xc2b2ae35u;
		sum += x;
	}
	CHECK(planes_checksum(bytes, sizeof(bytes)) == sum);
	CHECK(planes_checksum(bytes, 0) == 0);
}

TEST(a_flipped_bit_is_found_wherever_it_means_something)
{
	const uint32_t count = 4096;
	void *values = malloc(count * 2), *back = malloc(count * 2);
	unsigned char *stored = malloc(PLANES_ROOM);
	struct planes_chunk chunk;
	struct planes_parts parts;

	CHECK(values && back && stored);
	fill(PLANES_BF16, WEIGHTS, values, count);
	planes_encode(PLANES_BF16, values, count, stored, &chunk);
	CHECK(chunk.coded == PLANES_CODED);
	planes_parts(PLANES_BF16, count, chunk.escapes, &parts);
	/* The rest and plane A have no bit that means nothing. */
	for (uint32_t bit = parts.rest[0] * 8; bit < parts.b * 8; bit += 7) {
		stored[bit / 8] ^= (unsigned char)(1 << bit % 8);
		CHECK(!planes_decode(PLANES_BF16, stored, &chunk, count, back));
		stored[bit / 8] ^= (unsigned char)(1 << bit % 8);
	}
	CHECK(planes_decode(PLANES_BF16, stored, &chunk, count, back));
	free(values);
	free(back);
	free(stored);
}

TEST(what_contradicts_itself_is_not_passed)
{
	static const uint16_t none[3] = { 0, 0, 0 };
	struct planes_chunk chunk = { .coded = PLANES_CODED };
	struct planes_parts parts;

	planes_parts(PLANES_BF16, 100, none, &parts);
	chunk.bytes = parts.end;
	CHECK(planes_check(PLANES_BF16, 100, &chunk));
	CHECK(!planes_check(PLANES_BF16, 101 + 15, &chunk));
	chunk.coded = 2;
	CHECK(!planes_check(PLANES_BF16, 100, &chunk));
	chunk.coded = PLANES_PLAIN;
	CHECK(!planes_check(PLANES_BF16, 100, &chunk));
	chunk.bytes = 208;
	CHECK(planes_check(PLANES_BF16, 100, &chunk));
	chunk.escapes[0] = 1;
	CHECK(!planes_check(PLANES_BF16, 100, &chunk));
	for (int more = 0; more < 3; more++) {
		chunk = (struct planes_chunk){ .coded = PLANES_CODED, .escapes = { 9, 9, 9 } };
		chunk.escapes[more] = more ? 10 : 101;
		planes_parts(PLANES_BF16, 100, chunk.escapes, &parts);
		chunk.bytes = parts.end;
		CHECK(!planes_check(PLANES_BF16, 100, &chunk));
	}
}

/* Planes that claim more escapes than the table has, in buffers that end where the chunk does. */
TEST(hostile_planes_are_decoded_within_their_bounds)
{
	const struct planes_code *codes[PLANES_CODES];
	size_t code_count = planes_usable(codes);

	for (int round = 0; round < 3000; round++) {
		enum planes_kind kind = PLANES_BF16 + random_number() % (PLANES_KINDS - 1);
		uint32_t count = random_number() % (round % 10 ? 200 : PLANES_CHUNK + 1);
		struct planes_chunk chunk = { .coded = PLANES_CODED };
		unsigned char *stored, *values[PLANES_CODES];
		struct planes_parts parts;
		size_t bytes = (size_t)count * planes_shapes[kind].bytes;

		for (uint32_t i = 0, most = count; i < 3; i++) {
			chunk.escapes[i] = (uint16_t)(random_number() % (most + 1));
			most = chunk.escapes[i];
		}
		planes_parts(kind, count, chunk.escapes, &parts);
		chunk.bytes = parts.end;
		/* One that is not smaller than it would be plain is none. */
		CHECK_EQ(planes_check(kind, count, &chunk), parts.end < planes_plain(kind, count));
		if (parts.end >= planes_plain(kind, count))
			continue;
		stored = malloc(parts.end);
		CHECK(stored);
		for (uint32_t i = 0; i < parts.end; i++)
			stored[i] = round % 3 ? (unsigned char)random_number() : 0xff;
		for (size_t i = 0; i < code_count; i++) {
			values[i] = malloc(bytes ? bytes : 1);
			CHECK(values[i]);
			CHECK(!codes[i]->decode(kind, stored, &chunk, count, values[i]) || !count);
			CHECK(!memcmp(values[i], values[0], bytes));
		}
		for (size_t i = 0; i < code_count; i++)
			free(values[i]);
		free(stored);
	}
}

TEST_MAIN
