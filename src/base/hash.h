/* SPDX-License-Identifier: MIT */
#ifndef BASE_HASH_H
#define BASE_HASH_H
/* XXH3-128 over a stream of bytes, as 32 hex digits. */
#include <stddef.h>
#include <stdint.h>

#define HASH_TEXT_SIZE 33

struct hash;

struct hash *hash_new(void);	/* NULL: out of memory */
void hash_add(struct hash *hash, const void *bytes, size_t length);
void hash_text(const struct hash *hash, char text[HASH_TEXT_SIZE]);
void hash_free(struct hash *hash);

#endif
