/* SPDX-License-Identifier: MIT */
#ifndef BASE_TEXT_H
#define BASE_TEXT_H
/* Bounded strings, and sizes and times as people write them. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Copy, always terminated; text_copy_end keeps the end of what is too long, after "...". */
void text_copy(char *to, size_t size, const char *from);
void text_copy_end(char *to, size_t size, const char *from);

/* Take away what is left of a character of UTF-8 at the end of a text that was cut. */
void text_trim(char *text);

/*
 * What others have named, for people: characters that a terminal obeys or that do not show
 * (controls, marks that turn the direction of writing, those without width or ink) and bytes that
 * are no UTF-8 are written as \n, \t, \xNN, \uNNNN or \UNNNNNNNN, and a backslash twice. Writes
 * as much of it as there is room for, always terminated and never a part of a character; returns
 * the length of the whole, like snprintf. It grows fourfold at most. The second is for what may
 * hold a NUL; there must be one after its end, too.
 */
size_t text_escape(char *to, size_t size, const char *from);
size_t text_escape_bytes(char *to, size_t size, const char *from, size_t from_length);
#define TEXT_ESCAPE_GROWTH 4

/* The order of two texts by their bytes, a NUL being one like any other. */
int text_order(const char *a, size_t a_length, const char *b, size_t b_length);

bool text_ends_with(const char *text, const char *ending);

/*
 * "4096", "512K", "1.5M", "2GiB" (powers of 1024), "3GB" (powers of 1000). 0, -EINVAL for what is
 * no size, -ERANGE for what does not fit.
 */
int text_to_size(const char *text, uint64_t *size);

/* "250us", "5ms", "1.5s", "2" (seconds) -> nanoseconds. */
int text_to_nanoseconds(const char *text, uint64_t *ns);

/* A plain non-negative decimal number up to `max`. */
int text_to_number(const char *text, uint64_t max, uint64_t *number);

/* "1.50 GiB": short, for people. Returns `to`. */
char *text_from_size(uint64_t bytes, char *to, size_t size);
#define TEXT_SIZE_MAX 24

#endif
