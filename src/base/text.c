/* SPDX-License-Identifier: MIT */
/* Bounded strings, and sizes and times as people write them. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "base/text.h"

void text_trim(char *text)
{
	size_t length = strlen(text), start = length;

	while (start && length - start < 4 && (text[start - 1] & 0xc0) == 0x80)
		start--;
	if (!start || !(text[start - 1] & 0x80))
		return;
	start--;

	unsigned char lead = (unsigned char)text[start];
	size_t whole = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;

	if (length - start < whole)
		text[start] = 0;
}

void text_copy(char *to, size_t size, const char *from)
{
	size_t length = strnlen(from, size - 1);

	memcpy(to, from, length);
	to[length] = 0;
	if (from[length])
		text_trim(to);
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

/* The character at `at` and its length in bytes; what is no UTF-8 is -1 and one byte. */
static int32_t decode(const unsigned char *at, size_t *length)
{
	static const struct {
		unsigned char mask, lead;
		int32_t least;
	} forms[] = { { 0x80, 0x00, 0 }, { 0xe0, 0xc0, 0x80 }, { 0xf0, 0xe0, 0x800 },
		      { 0xf8, 0xf0, 0x10000 } };
	size_t more = 0;
	int32_t value;

	*length = 1;
	while (more < 4 && (at[0] & forms[more].mask) != forms[more].lead)
		more++;
	if (more == 4)
		return -1;
	value = at[0] & ~forms[more].mask & 0xff;
	for (size_t i = 1; i <= more; i++) {
		if ((at[i] & 0xc0) != 0x80)
			return -1;
		value = value << 6 | (at[i] & 0x3f);
	}
	if (value < forms[more].least || value > 0x10ffff || (value >= 0xd800 && value < 0xe000))
		return -1;
	*length = more + 1;
	return value;
}

/*
 * Controls, ends of lines and what annotates between them; and all that Unicode lets a program not
 * show at all (Default_Ignorable_Code_Point), among which are letters without ink.
 */
static bool is_hidden(int32_t character)
{
	static const struct {
		int32_t first, last;
	} hidden[] = {
		{ 0x00, 0x1f },	      { 0x7f, 0x9f },	    { 0xad, 0xad },
		{ 0x34f, 0x34f },     { 0x61c, 0x61c },	    { 0x115f, 0x1160 },
		{ 0x17b4, 0x17b5 },   { 0x180b, 0x180f },   { 0x200b, 0x200f },
		{ 0x2028, 0x202e },   { 0x2060, 0x206f },   { 0x3164, 0x3164 },
		{ 0xfe00, 0xfe0f },   { 0xfeff, 0xfeff },   { 0xffa0, 0xffa0 },
		{ 0xfff0, 0xfffb },   { 0x1bca0, 0x1bca3 }, { 0x1d173, 0x1d17a },
		{ 0xe0000, 0xe0fff },
	};

	for (size_t i = 0; i < sizeof(hidden) / sizeof(hidden[0]); i++)
		if (character >= hidden[i].first && character <= hidden[i].last)
			return true;
	return false;
}

/* One character as it may be shown; returns the length. */
static size_t escape_one(const unsigned char *at, int32_t character, size_t length, char shown[12])
{
	if (character == '\n' || character == '\t' || character == '\\')
		return (size_t)sprintf(shown, "\\%c", character == '\n' ? 'n'
						      : character == '\t' ? 't' : '\\');
	if (character < 0 || (character < 0x80 && is_hidden(character)))
		return (size_t)sprintf(shown, "\\x%02x", at[0]);
	if (is_hidden(character))
		return (size_t)sprintf(shown, character > 0xffff ? "\\U%08x" : "\\u%04x",
				       (unsigned int)character);
	memcpy(shown, at, length);
	return length;
}

size_t text_escape_bytes(char *to, size_t size, const char *from, size_t from_length)
{
	const unsigned char *at = (const unsigned char *)from, *end = at + from_length;
	size_t used = 0, whole = 0, length;

	for (; at < end; at += length) {
		int32_t character = decode(at, &length);
		char shown[12];
		size_t room = escape_one(at, character, length, shown);

		/* Nothing after the first that has no room. */
		if (used == whole && used + room < size) {
			memcpy(to + used, shown, room);
			used += room;
		}
		whole += room;
	}
	if (size)
		to[used] = 0;
	return whole;
}

size_t text_escape(char *to, size_t size, const char *from)
{
	return text_escape_bytes(to, size, from, strlen(from));
}

int text_order(const char *a, size_t a_length, const char *b, size_t b_length)
{
	int order = memcmp(a, b, a_length < b_length ? a_length : b_length);

	return order ? order : (a_length > b_length) - (a_length < b_length);
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
