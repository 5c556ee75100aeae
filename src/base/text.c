/* SPDX-License-Identifier: MIT */
/* Bounded strings, and sizes and times as people write them. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "base/text.h"

void text_copy(char *to, size_t size, const char *from)
{
	size_t length = strnlen(from, size - 1);

	memcpy(to, from, length);
	to[length] = 0;
}

void text_copy_end(char *to, size_t size, const char *from)
{
	size_t length = strlen(from);

	if (length < size) {
		memcpy(to, from, length + 1);
		return;
	}
	from += length - (size - 4);
	/* Not in the middle of a character of UTF-8. */
	while ((*from & 0xc0) == 0x80)
		from++;
	memcpy(to, "...", 3);
	strcpy(to + 3, from);
}

bool text_ends_with(const char *text, const char *ending)
{
	size_t length = strlen(text), tail = strlen(ending);

	return length >= tail && !strcmp(text + length - tail, ending);
}

/* The number at the start of `text`, and where it ends. Only digits and one point: strtod alone
 * would also take signs, hex, "inf" and "nan". */
static int leading_number(const char *text, double *value, const char **end)
{
	size_t digits = strspn(text, "0123456789.");
	char *stop;

	if (!digits || !isdigit((unsigned char)text[0]))
		return -EINVAL;
	errno = 0;
	*value = strtod(text, &stop);
	if (stop != text + digits || errno)
		return -EINVAL;
	*end = stop;
	return 0;
}

struct unit {
	const char *name;
	double factor;
};

static int scaled(const char *text, const struct unit *units, uint64_t *result)
{
	const char *end;
	double value;
	int rc = leading_number(text, &value, &end);

	if (rc)
		return rc;
	for (; units->name; units++)
		if (!strcasecmp(end, units->name))
			break;
	if (!units->name)
		return -EINVAL;
	/* Whole numbers keep all 64 bits; a double would lose the low ones. */
	if (!memchr(text, '.', (size_t)(end - text))) {
		errno = 0;
		unsigned long long whole = strtoull(text, NULL, 10);
		if (errno || __builtin_mul_overflow(whole, (uint64_t)units->factor, result))
			return -ERANGE;
		return 0;
	}
	value *= units->factor;
	if (value >= 18446744073709551616.0)
		return -ERANGE;
	*result = (uint64_t)(value + 0.5);
	return 0;
}

int text_to_size(const char *text, uint64_t *size)
{
	static const struct unit units[] = {
		{ "", 1 },		 { "B", 1 },
		{ "K", 0x1p10 },	 { "KiB", 0x1p10 }, { "KB", 1e3 },
		{ "M", 0x1p20 },	 { "MiB", 0x1p20 }, { "MB", 1e6 },
		{ "G", 0x1p30 },	 { "GiB", 0x1p30 }, { "GB", 1e9 },
		{ "T", 0x1p40 },	 { "TiB", 0x1p40 }, { "TB", 1e12 },
		{ NULL, 0 },
	};

	return scaled(text, units, size);
}

int text_to_nanoseconds(const char *text, uint64_t *ns)
{
	static const struct unit units[] = {
		{ "", 1e9 }, { "s", 1e9 }, { "ms", 1e6 }, { "us", 1e3 }, { "ns", 1 }, { NULL, 0 },
	};

	return scaled(text, units, ns);
}

int text_to_number(const char *text, uint64_t max, uint64_t *number)
{
	static const struct unit units[] = { { "", 1 }, { NULL, 0 } };
	int rc;

	if (strchr(text, '.'))
		return -EINVAL;
	rc = scaled(text, units, number);
	if (!rc && *number > max)
		rc = -ERANGE;
	return rc;
}

char *text_from_size(uint64_t bytes, char *to, size_t size)
{
	static const char *const names[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
	double value = (double)bytes;
	unsigned int unit = 0;

	while (value >= 1024 && unit + 1 < sizeof(names) / sizeof(names[0])) {
		value /= 1024;
		unit++;
	}
	if (!unit)
		snprintf(to, size, "%llu B", (unsigned long long)bytes);
	else
		snprintf(to, size, "%.*f %s", value < 10 ? 2 : value < 100 ? 1 : 0, value,
			 names[unit]);
	return to;
}
