/* SPDX-License-Identifier: MIT */
/* The pattern: from any offset, for any length, every 8 bytes state their own offset. */
#include "base/pattern.h"
#include "test.h"

/* Said once more, the slow way. */
static unsigned char byte_at(uint64_t offset)
{
	unsigned char word[8];
	uint64_t start = offset & ~7ull;

	for (int i = 0; i < 8; i++)
		word[i] = (unsigned char)(start >> (8 * i));
	return word[offset & 7];
}

static const uint64_t bases[] = { 0, 1 << 20, 0x0102030405060700ull, (1ull << 63) - 512 };
#define BASES (sizeof(bases) / sizeof(bases[0]))

TEST(every_offset_and_length_gives_the_same_bytes)
{
	unsigned char bytes[64];

	for (size_t b = 0; b < BASES; b++)
		for (unsigned int skew = 0; skew < 17; skew++)
			for (size_t length = 0; length < 48; length++) {
				uint64_t offset = bases[b] + skew;

				memset(bytes, 0xee, sizeof(bytes));
				pattern_fill(bytes + 1, length, offset);
				CHECK_EQ(bytes[0], 0xee);
				CHECK_EQ(bytes[length + 1], 0xee);
				for (size_t i = 0; i < length; i++)
					CHECK_EQ(bytes[i + 1], byte_at(offset + i));
				CHECK_EQ(pattern_check(bytes + 1, length, offset), length);
			}
}

TEST(pieces_make_the_same_whole)
{
	static unsigned char whole[5000], pieces[5000];

	pattern_fill(whole, sizeof(whole), 777);
	for (size_t at = 0, step = 1; at < sizeof(pieces); at += step, step = step * 5 % 97 + 1) {
		size_t left = sizeof(pieces) - at;

		pattern_fill(pieces + at, left < step ? left : step, 777 + at);
	}
	CHECK(!memcmp(whole, pieces, sizeof(whole)));
}

TEST(the_first_wrong_byte_is_found_wherever_it_is)
{
	unsigned char bytes[40];

	for (unsigned int skew = 0; skew < 9; skew++)
		for (size_t bad = 0; bad < sizeof(bytes); bad++) {
			pattern_fill(bytes, sizeof(bytes), 0x123456700 + skew);
			bytes[bad] ^= 0x10;
			CHECK_EQ(pattern_check(bytes, sizeof(bytes), 0x123456700 + skew), bad);
			bytes[sizeof(bytes) - 1] ^= 1;
			CHECK_EQ(pattern_check(bytes, sizeof(bytes), 0x123456700 + skew), bad);
		}
}

TEST(a_misplaced_stretch_is_no_pattern)
{
	static unsigned char bytes[4096];

	pattern_fill(bytes, sizeof(bytes), 8192);
	CHECK(pattern_check(bytes, sizeof(bytes), 4096) < 8);
	memset(bytes, 0, sizeof(bytes));
	CHECK_EQ(pattern_check(bytes, sizeof(bytes), 0), 8);
}

TEST_MAIN
