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
