/* SPDX-License-Identifier: MIT */
/* Errors of the format layer; see words.h. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include "base/text.h"
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

char *words_name(char to[WORDS_NAME], const char *name)
{
	text_copy_end(to, WORDS_NAME, name);
	return to;
}
