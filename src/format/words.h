/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_WORDS_H
#define FORMAT_WORDS_H
/* Saying what is wrong with a file, when the names in it may be long. */
#include "base/error.h"

#define WORDS_NAME 96

/* Fill `err` as an error of the format and return -EBADMSG. */
int words_bad(struct pen_error *err, const char *object, int64_t offset, const char *format, ...)
	PRINTF_LIKE(4, 5);

/*
 * A name as a message has room for it: of a long one the end is kept. Returns `to`. The second is
 * for names that may hold a NUL, which is shown by its symbol.
 */
char *words_name(char to[WORDS_NAME], const char *name);
char *words_text(char to[WORDS_NAME], const char *text, size_t length);

#endif
