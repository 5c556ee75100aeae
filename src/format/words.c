/* SPDX-License-Identifier: MIT */
/* Errors of the format layer; see words.h. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "format/words.h"

int words_bad(struct pen_error *err, const char *object, int64_t offset, const char *format, ...)
{
	char message[sizeof(err->message)];
	va_list args;

	if (!err)
		return -EBADMSG;
	va_start(args, format);
	vsnprintf(message, sizeof(message), format, args);
	va_end(args);
	error_vendor(err, -EBADMSG, PEN_DOMAIN_FORMAT, 0, "read", object, "%s", message);
	err->offset = offset;
	return -EBADMSG;
}

char *words_text(char to[WORDS_NAME], const char *text, size_t length)
{
	static const char nul[] = "\xe2\x90\x80";	/* U+2400 */
	size_t start = length, room = 0;
	char *at = to;

	/* Room for all of it, or for its end after three points. */
	for (; start && room < WORDS_NAME; start--)
		room += text[start - 1] ? 1 : sizeof(nul) - 1;
	if (room >= WORDS_NAME) {
		for (; room >= WORDS_NAME - 3; start++)
			room -= text[start] ? 1 : sizeof(nul) - 1;
		/* Not in the middle of a character of UTF-8. */
		while (start < length && (text[start] & 0xc0) == 0x80)
			start++;
		at = stpcpy(to, "...");
	}
	for (; start < length; start++) {
		if (text[start])
			*at++ = text[start];
		else
			at = stpcpy(at, nul);
	}
	*at = 0;
	return to;
}

char *words_name(char to[WORDS_NAME], const char *name)
{
	return words_text(to, name, strlen(name));
}
