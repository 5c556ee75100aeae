/* SPDX-License-Identifier: MIT */
/* The error record: filling it, and turning it into one readable line. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"

static void fill(struct pen_error *err, int code, enum pen_domain domain, int raw,
		 const char *operation, const char *object, int64_t offset)
{
	memset(err, 0, sizeof(*err));
	err->code = code;
	err->domain = domain;
	err->raw = raw;
	err->offset = offset;
	text_copy(err->operation, sizeof(err->operation), operation);
	text_copy_end(err->object, sizeof(err->object), object ? object : "");
}

static void write_words(char *to, size_t size, const char *format, va_list args)
{
	if (vsnprintf(to, size, format, args) >= (int)size)
		text_trim(to);
}

int error_sys(struct pen_error *err, int code, const char *operation, const char *object,
	      int64_t offset)
{
	if (err) {
		fill(err, code, PEN_DOMAIN_ERRNO, -code, operation, object, offset);
		/* GNU strerror_r: the returned text may be a constant rather than our buffer. */
		char buffer[128];
		text_copy(err->message, sizeof(err->message),
			  strerror_r(-code, buffer, sizeof(buffer)));
	}
	return code;
}

int error_set(struct pen_error *err, int code, const char *operation, const char *object,
	      int64_t offset, const char *format, ...)
{
	if (err) {
		va_list args;

		fill(err, code, PEN_DOMAIN_ERRNO, -code, operation, object, offset);
		va_start(args, format);
		write_words(err->message, sizeof(err->message), format, args);
		va_end(args);
	}
	return code;
}

int error_vendor(struct pen_error *err, int code, enum pen_domain domain, int raw,
		 const char *operation, const char *object, const char *format, ...)
{
	if (err) {
		va_list args;

		fill(err, code, domain, raw, operation, object, -1);
		va_start(args, format);
		write_words(err->message, sizeof(err->message), format, args);
		va_end(args);
	}
	return code;
}

void error_hint(struct pen_error *err, const char *format, ...)
{
	va_list args;

	if (!err || err->hint[0])
		return;
	va_start(args, format);
	write_words(err->hint, sizeof(err->hint), format, args);
	va_end(args);
}

void error_clear(struct pen_error *err)
{
	if (err) {
		memset(err, 0, sizeof(*err));
		err->offset = -1;
	}
}

const char *pen_domain_name(int domain)
{
	static const char *const names[] = { "errno", "cuda", "cufile", "format" };

	return domain >= 0 && domain < (int)(sizeof(names) / sizeof(names[0])) ? names[domain]
									      : "unknown";
}

int pen_error_format(const struct pen_error *err, char *text, size_t size)
{
	char plain[sizeof(*err) + 64], at[40] = "";

	if (err->offset >= 0)
		snprintf(at, sizeof(at), " at byte %lld", (long long)err->offset);
	snprintf(plain, sizeof(plain), "cannot %s%s%s%s: %s%s%s", err->operation,
		 err->object[0] ? " " : "", err->object, at, err->message,
		 err->hint[0] ? ". " : "", err->hint);
	return (int)text_escape(text, size, plain);
}
