/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_DTYPE_H
#define FORMAT_DTYPE_H
/* What the format layer asks about kinds of numbers, beside pen_dtype_name() and _bits(). */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* enum pen_dtype by name; -1 where there is none. */
int dtype_parse(const char *name, size_t length);

/* Bytes of that many elements; false if they do not fit into 64 bits, or end inside a byte. */
bool dtype_bytes(int dtype, uint64_t elements, uint64_t *bytes);

#endif
