/* SPDX-License-Identifier: MIT */
/* The stream hash is XXH3-128 as the library computes it in one go, however the bytes arrive. */
#include <stdint.h>
#include <xxhash.h>
#include "base/hash.h"
#include "test.h"

static unsigned char bytes[1 << 16];

static void fill(void)
{
	uint64_t seed = 42;

	for (size_t i = 0; i < sizeof(bytes); i++) {
		seed = seed * 6364136223846793005ull + 1442695040888963407ull;
		bytes[i] = (unsigned char)(seed >> 56);
	}
}

static void one_shot(size_t length, char text[HASH_TEXT_SIZE])
{
	XXH128_hash_t value = XXH3_128bits(bytes, length);

	snprintf(text, HASH_TEXT_SIZE, "%016llx%016llx", (unsigned long long)value.high64,
		 (unsigned long long)value.low64);
}

TEST(nothing_has_the_published_hash)
{
	struct hash *hash = hash_new();
	char text[HASH_TEXT_SIZE];

	CHECK(hash != NULL);
	hash_text(hash, text);
	CHECK_TEXT(text, "99aa06d3014798d86001c324468d497f");
	hash_free(hash);
}

TEST(it_is_the_librarys_one_shot_hash)
{
	static const size_t lengths[] = { 1, 3, 8, 16, 17, 128, 129, 240, 241, 256, 1024, 4095,
					  4096, 65535, 65536 };

	fill();
	for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
		struct hash *hash = hash_new();
		char text[HASH_TEXT_SIZE], want[HASH_TEXT_SIZE];

		hash_add(hash, bytes, lengths[i]);
		hash_text(hash, text);
		one_shot(lengths[i], want);
		CHECK_TEXT(text, want);
		hash_free(hash);
	}
}

TEST(it_does_not_matter_how_the_bytes_are_cut)
{
	char want[HASH_TEXT_SIZE], text[HASH_TEXT_SIZE];

	fill();
	one_shot(sizeof(bytes), want);
	for (size_t chunk = 1; chunk < sizeof(bytes); chunk = chunk * 3 + 1) {
		struct hash *hash = hash_new();

		for (size_t at = 0; at < sizeof(bytes); at += chunk) {
			size_t left = sizeof(bytes) - at;

			hash_add(hash, bytes + at, left < chunk ? left : chunk);
			hash_add(hash, bytes, 0);
		}
		hash_text(hash, text);
		CHECK_TEXT(text, want);
		hash_free(hash);
	}
}

TEST(asking_for_the_text_does_not_end_the_stream)
{
	struct hash *hash = hash_new();
	char text[HASH_TEXT_SIZE], want[HASH_TEXT_SIZE];

	fill();
	hash_add(hash, bytes, 1000);
	hash_text(hash, text);
	hash_add(hash, bytes + 1000, 1000);
	hash_text(hash, text);
	one_shot(2000, want);
	CHECK_TEXT(text, want);
	hash_free(hash);
	hash_free(NULL);
}

TEST_MAIN
