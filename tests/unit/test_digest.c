/* SPDX-License-Identifier: MIT */
/*
 * Digests are the ones that everybody else computes for the same bytes, whichever of its vectors
 * the CPU uses, and CRCs of neighbours join to the CRC of the whole.
 */
#include <errno.h>
#include <libdeflate.h>
#include <limits.h>
#include <stdint.h>
#include <xxhash.h>
#include "base/digest.h"
#include "base/digest_xxh3.h"
#include "penstock.h"
#include "test.h"

#define LARGE (1 << 20)
#define LENGTHS 2000
#define STARTS 64

static unsigned char bytes[LARGE + STARTS];

static uint64_t seed = 42;

static uint64_t random_number(void)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return seed >> 16;
}

static void fill(void)
{
	for (size_t i = 0; i < sizeof(bytes); i++)
		bytes[i] = (unsigned char)random_number();
}

/* The digests as Python's zlib.crc32 and Debian's libxxhash 0.8.1 gave them. */
static const struct vector {
	const char *text;	/* NULL: of the first `length` bytes of a formula */
	size_t length;
	uint64_t xxh3, crc32;
} vectors[] = {
	{ "", 0, 0x2d06800538d394c2, 0 },
	{ "a", 1, 0xe6c632b61e964e1f, 0xe8b7be43 },
	{ "123456789", 9, 0x72dcb18b67a17dff, 0xcbf43926 },
	{ "The quick brown fox jumps over the lazy dog", 43, 0xce7d19a5418fb365, 0x414fa339 },
	{ NULL, 240, 0x222a93603817aaa2, 0x203db892 },
	{ NULL, 241, 0xc80f5572d153a3a4, 0xeafa10f1 },
	{ NULL, 1024, 0xd8c6a79e522ec59d, 0x0b3b197f },
	{ NULL, 1025, 0x2f2fc0b3881eead8, 0x12b3b839 },
	{ NULL, LARGE, 0x7bd8acbf1497f891, 0xb4d3b704 },
};

TEST(known_bytes_have_their_known_digests)
{
	for (size_t i = 0; i < LARGE; i++)
		bytes[i] = (unsigned char)(i * i >> 3 ^ i * 31);
	for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]); i++) {
		const struct vector *known = &vectors[i];
		const void *at = known->text ? (const void *)known->text : bytes;
		uint64_t digest;

		CHECK_EQ(digest_kind(PEN_DIGEST_XXH3)->of(at, known->length), known->xxh3);
		CHECK_EQ(digest_kind(PEN_DIGEST_CRC32)->of(at, known->length), known->crc32);
		CHECK_EQ(pen_digest_of(PEN_DIGEST_XXH3, at, known->length, &digest, NULL), 0);
		CHECK_EQ(digest, known->xxh3);
		CHECK_EQ(pen_digest_of(PEN_DIGEST_CRC32, at, known->length, &digest, NULL), 0);
		CHECK_EQ(digest, known->crc32);
	}
}

TEST(nothing_at_no_address_has_a_digest)
{
	CHECK_EQ(digest_kind(PEN_DIGEST_XXH3)->of(NULL, 0), 0x2d06800538d394c2);
	CHECK_EQ(digest_kind(PEN_DIGEST_CRC32)->of(NULL, 0), 0);
}

TEST(the_table_uses_the_fastest_function_that_the_cpu_can_run)
{
	digest_xxh3_function *usable[DIGEST_XXH3_MAX];
	size_t count = digest_xxh3_usable(usable);

	CHECK(count >= 1 && count <= DIGEST_XXH3_MAX);
	CHECK(digest_kind(PEN_DIGEST_XXH3)->of == usable[0]);
	CHECK(usable[count - 1] == digest_xxh3_baseline);
#ifdef __x86_64__
	CHECK_EQ(count, 1 + !!__builtin_cpu_supports("avx2") + !!__builtin_cpu_supports("avx512f"));
#endif
}

static void check_xxh3(digest_xxh3_function *of, size_t start, size_t length)
{
	CHECK_EQ(of(bytes + start, length), XXH3_64bits(bytes + start, length));
}

TEST(every_xxh3_agrees_with_the_library_on_every_length_and_start)
{
	digest_xxh3_function *usable[DIGEST_XXH3_MAX];
	size_t count = digest_xxh3_usable(usable);

	fill();
	for (size_t i = 0; i < count; i++) {
		for (size_t length = 0; length <= LENGTHS; length++)
			for (size_t start = 0; start < STARTS; start += 1 + length % 7)
				check_xxh3(usable[i], start, length);
		for (size_t start = 0; start < STARTS; start++)
			check_xxh3(usable[i], start, LARGE - start % 3);
	}
}

/* One bit after the other, as the standard tells it. */
static uint64_t plain_crc32(const unsigned char *at, size_t length)
{
	uint32_t crc = ~0u;

	for (size_t i = 0; i < length; i++) {
		crc ^= at[i];
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
	}
	return (uint32_t)~crc;
}

TEST(crc32_agrees_with_its_definition_on_every_length_and_start)
{
	const struct digest_kind *crc32 = digest_kind(PEN_DIGEST_CRC32);

	fill();
	for (size_t length = 0; length <= LENGTHS; length++) {
		size_t start = length % STARTS;

		CHECK_EQ(crc32->of(bytes + start, length), plain_crc32(bytes + start, length));
	}
	CHECK_EQ(crc32->of(bytes + 3, LARGE), plain_crc32(bytes + 3, LARGE));
}

static void check_join(size_t middle, size_t length)
{
	uint64_t first = libdeflate_crc32(0, bytes, middle);
	uint64_t second = libdeflate_crc32(0, bytes + middle, length - middle);
	uint64_t whole = libdeflate_crc32(0, bytes, length);

	CHECK_EQ(digest_crc32_join(first, second, length - middle), whole);
	CHECK_EQ(pen_digest_crc32_join(first, second, length - middle), whole);
}

TEST(crc32s_of_neighbours_join)
{
	fill();
	for (size_t length = 0; length < 40; length++)
		for (size_t middle = 0; middle <= length; middle++)
			check_join(middle, length);
	for (size_t i = 0; i < 500; i++) {
		size_t length = random_number() % (LARGE + 1);

		check_join(random_number() % (length + 1), length);
	}
}

TEST(crc32s_join_over_more_than_32_bits_of_length)
{
	/* "penstock", then 5 GiB and 3 bytes of zeros, by Python's zlib.crc32. */
	CHECK_EQ(digest_crc32_join(0xaf16e2ec, 0x5335f577, (5ull << 30) + 3), 0x483a490f);
}

TEST(crc32s_join_in_any_order)
{
	uint64_t one, two, three, whole;

	fill();
	one = libdeflate_crc32(0, bytes, 1000);
	two = libdeflate_crc32(0, bytes + 1000, 3000);
	three = libdeflate_crc32(0, bytes + 4000, 77);
	whole = libdeflate_crc32(0, bytes, 4077);
	CHECK_EQ(digest_crc32_join(digest_crc32_join(one, two, 3000), three, 77), whole);
	CHECK_EQ(digest_crc32_join(one, digest_crc32_join(two, three, 77), 3077), whole);
}

TEST(kinds_have_names_and_bits)
{
	CHECK_EQ(PEN_DIGEST_XXH3, 1);
	CHECK_EQ(PEN_DIGEST_CRC32, 2);
	CHECK_TEXT(digest_kind(PEN_DIGEST_XXH3)->name, "xxh3-64");
	CHECK_EQ(digest_kind(PEN_DIGEST_XXH3)->bits, 64);
	CHECK_TEXT(digest_kind(PEN_DIGEST_CRC32)->name, "crc32");
	CHECK_EQ(digest_kind(PEN_DIGEST_CRC32)->bits, 32);
	CHECK_TEXT(pen_digest_name(PEN_DIGEST_XXH3), "xxh3-64");
	CHECK_TEXT(pen_digest_name(PEN_DIGEST_CRC32), "crc32");
}

TEST(an_unknown_kind_is_refused_in_words)
{
	static const int unknown[] = { PEN_DIGEST_NONE, -1, PEN_DIGEST_CRC32 + 1, INT_MAX,
					INT_MIN };

	for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
		struct pen_error err;
		uint64_t digest = 7;
		char want[64];

		CHECK(!digest_kind(unknown[i]));
		CHECK(!pen_digest_name(unknown[i]));
		CHECK_EQ(pen_digest_of(unknown[i], "a", 1, &digest, &err), -EINVAL);
		CHECK_EQ(err.code, -EINVAL);
		snprintf(want, sizeof(want), "%d is no kind of digest", unknown[i]);
		CHECK_TEXT(err.message, want);
		CHECK(strstr(err.hint, "PEN_DIGEST_XXH3 (1)"));
		CHECK_EQ(digest, 7);
		CHECK_EQ(pen_digest_of(unknown[i], "a", 1, &digest, NULL), -EINVAL);
	}
}

TEST_MAIN
