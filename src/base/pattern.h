/* SPDX-License-Identifier: MIT */
#ifndef BASE_PATTERN_H
#define BASE_PATTERN_H
/*
 * The pattern: every 8 bytes, little-endian, state their own offset, so that one look at a
 * misplaced byte tells where it came from. Works from any offset for any length.
 */
#include <stddef.h>
#include <stdint.h>

void pattern_fill(void *bytes, size_t length, uint64_t offset);

/* The index of the first byte that differs from the pattern, or `length`. */
size_t pattern_check(const void *bytes, size_t length, uint64_t offset);

#endif
