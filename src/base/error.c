/* SPDX-License-Identifier: MIT */
/* The error record: filling it, and turning it into one readable line. */
#include <errno.h>
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

#define NAME(number) [number] = #number

const char *error_name(int number)
{
	static const char *const names[] = {
		NAME(EPERM), NAME(ENOENT), NAME(ESRCH), NAME(EINTR), NAME(EIO), NAME(ENXIO),
		NAME(E2BIG), NAME(ENOEXEC), NAME(EBADF), NAME(ECHILD), NAME(EAGAIN), NAME(ENOMEM),
		NAME(EACCES), NAME(EFAULT), NAME(ENOTBLK), NAME(EBUSY), NAME(EEXIST), NAME(EXDEV),
		NAME(ENODEV), NAME(ENOTDIR), NAME(EISDIR), NAME(EINVAL), NAME(ENFILE), NAME(EMFILE),
		NAME(ENOTTY), NAME(ETXTBSY), NAME(EFBIG), NAME(ENOSPC), NAME(ESPIPE), NAME(EROFS),
		NAME(EMLINK), NAME(EPIPE), NAME(EDOM), NAME(ERANGE), NAME(EDEADLK),
		NAME(ENAMETOOLONG), NAME(ENOLCK), NAME(ENOSYS), NAME(ENOTEMPTY), NAME(ELOOP),
		NAME(ENOMSG), NAME(EIDRM), NAME(ECHRNG), NAME(EL2NSYNC), NAME(EL3HLT), NAME(EL3RST),
		NAME(ELNRNG), NAME(EUNATCH), NAME(ENOCSI), NAME(EL2HLT), NAME(EBADE), NAME(EBADR),
		NAME(EXFULL), NAME(ENOANO), NAME(EBADRQC), NAME(EBADSLT), NAME(EBFONT),
		NAME(ENOSTR), NAME(ENODATA), NAME(ETIME), NAME(ENOSR), NAME(ENONET), NAME(ENOPKG),
		NAME(EREMOTE), NAME(ENOLINK), NAME(EADV), NAME(ESRMNT), NAME(ECOMM), NAME(EPROTO),
		NAME(EMULTIHOP), NAME(EDOTDOT), NAME(EBADMSG), NAME(EOVERFLOW), NAME(ENOTUNIQ),
		NAME(EBADFD), NAME(EREMCHG), NAME(ELIBACC), NAME(ELIBBAD), NAME(ELIBSCN),
		NAME(ELIBMAX), NAME(ELIBEXEC), NAME(EILSEQ), NAME(ERESTART), NAME(ESTRPIPE),
		NAME(EUSERS), NAME(ENOTSOCK), NAME(EDESTADDRREQ), NAME(EMSGSIZE), NAME(EPROTOTYPE),
		NAME(ENOPROTOOPT), NAME(EPROTONOSUPPORT), NAME(ESOCKTNOSUPPORT), NAME(EOPNOTSUPP),
		NAME(EPFNOSUPPORT), NAME(EAFNOSUPPORT), NAME(EADDRINUSE), NAME(EADDRNOTAVAIL),
		NAME(ENETDOWN), NAME(ENETUNREACH), NAME(ENETRESET), NAME(ECONNABORTED),
		NAME(ECONNRESET), NAME(ENOBUFS), NAME(EISCONN), NAME(ENOTCONN), NAME(ESHUTDOWN),
		NAME(ETOOMANYREFS), NAME(ETIMEDOUT), NAME(ECONNREFUSED), NAME(EHOSTDOWN),
		NAME(EHOSTUNREACH), NAME(EALREADY), NAME(EINPROGRESS), NAME(ESTALE), NAME(EUCLEAN),
		NAME(ENOTNAM), NAME(ENAVAIL), NAME(EISNAM), NAME(EREMOTEIO), NAME(EDQUOT),
		NAME(ENOMEDIUM), NAME(EMEDIUMTYPE), NAME(ECANCELED), NAME(ENOKEY),
		NAME(EKEYEXPIRED), NAME(EKEYREVOKED), NAME(EKEYREJECTED), NAME(EOWNERDEAD),
		NAME(ENOTRECOVERABLE), NAME(ERFKILL), NAME(EHWPOISON),
	};

	return number > 0 && number < (int)(sizeof(names) / sizeof(names[0])) ? names[number]
									      : NULL;
}
