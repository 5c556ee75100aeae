/* SPDX-License-Identifier: MIT */
/* XXH3-128 over a stream of bytes. */
#include <stdio.h>
#include <xxhash.h>
#include "base/hash.h"

/* The library wants its state aligned to 64 bytes, so its own constructor makes it. */
static XXH3_state_t *state_of(const struct hash *hash)
{
	return (XXH3_state_t *)hash;
}

struct hash *hash_new(void)
{
	XXH3_state_t *state = XXH3_createState();

	if (state)
		XXH3_128bits_reset(state);
	return (struct hash *)state;
}

void hash_add(struct hash *hash, const void *bytes, size_t length)
{
	XXH3_128bits_update(state_of(hash), bytes, length);
}

void hash_text(const struct hash *hash, char text[HASH_TEXT_SIZE])
{
	XXH128_hash_t value = XXH3_128bits_digest(state_of(hash));

	snprintf(text, HASH_TEXT_SIZE, "%016llx%016llx", (unsigned long long)value.high64,
		 (unsigned long long)value.low64);
}

void hash_free(struct hash *hash)
{
	if (hash)
		XXH3_freeState(state_of(hash));
}
