/* SPDX-License-Identifier: MIT */
/* Bytes that state their own offset; see pattern.h. */
#include <endian.h>
#include <string.h>
#include "base/pattern.h"

static unsigned char byte_at(uint64_t offset)
{
	return (unsigned char)((offset & ~7ull) >> (8 * (offset & 7)));
}

void pattern_fill(void *bytes, size_t length, uint64_t offset)
{
	unsigned char *at = bytes;

	for (; length && (offset & 7); length--)
		*at++ = byte_at(offset++);
	for (; length >= 8; length -= 8, at += 8, offset += 8) {
		uint64_t word = htole64(offset);
		memcpy(at, &word, 8);
	}
	for (; length; length--)
		*at++ = byte_at(offset++);
}

size_t pattern_check(const void *bytes, size_t length, uint64_t offset)
{
	const unsigned char *at = bytes;
	size_t i = 0;

	while (i < length) {
		if (!((offset + i) & 7) && length - i >= 8) {
			uint64_t word;
			memcpy(&word, at + i, 8);
			if (le64toh(word) == offset + i) {
				i += 8;
				continue;
			}
		}
		if (at[i] != byte_at(offset + i))
			return i;
		i++;
	}
	return length;
}
