/* SPDX-License-Identifier: MIT */
/* Writing JSON into memory that grows; see json_write.h. */
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "format/json_write.h"
#include "format/scan.h"
#include "sys/os.h"

#define FIRST_ROOM 4096
#define PRINT_MAX 128

void json_put(struct json_text *json, const char *bytes, size_t length)
{
	if (json->rc)
		return;
	if (json->room - json->length < length) {
		size_t room = json->room ? 2 * json->room : FIRST_ROOM;
		char *grown;

		while (room - json->length < length)
			room *= 2;
		grown = os_realloc(json->bytes, room, 1);
		if (!grown) {
			json->rc = -ENOMEM;
			return;
		}
		json->bytes = grown;
		json->room = room;
	}
	memcpy(json->bytes + json->length, bytes, length);
	json->length += length;
}

void json_print(struct json_text *json, const char *format, ...)
{
	char text[PRINT_MAX];
	va_list args;
	int length;

	va_start(args, format);
	length = vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	json_put(json, text, (size_t)length);
}

/* The number of a character of UTF-8 that has two bytes or more. */
static uint32_t number_of(const unsigned char *at, size_t length)
{
	uint32_t number = at[0] & (0x7fu >> length);

	for (size_t i = 1; i < length; i++)
		number = number << 6 | (at[i] & 0x3fu);
	return number;
}

/* A character by its number; beyond 16 bits by two halves. */
static void put_escaped(struct json_text *json, uint32_t number)
{
	if (number < 0x10000) {
		json_print(json, "\\u%04x", number);
		return;
	}
	number -= 0x10000;
	json_print(json, "\\u%04x\\u%04x", 0xd800 + (number >> 10), 0xdc00 + (number & 0x3ff));
}

static void put_ascii(struct json_text *json, unsigned char byte, bool ascii)
{
	static const char special[] = "\"\\\b\f\n\r\t", shorthand[] = "\"\\bfnrt";
	const char *found = byte ? strchr(special, byte) : NULL;

	if (found)
		json_print(json, "\\%c", shorthand[found - special]);
	else if (byte < 0x20 || (ascii && byte == 0x7f))
		put_escaped(json, byte);
	else
		json_put(json, (const char *)&byte, 1);
}

void json_quote(struct json_text *json, const char *text, size_t length, bool ascii)
{
	const unsigned char *at = (const unsigned char *)text, *end = at + length;

	json_put(json, "\"", 1);
	while (at < end && !json->rc) {
		size_t taken = *at < 0x80 ? 1 : scan_utf8(at, end);

		if (!taken)
			json->rc = -EILSEQ;
		else if (taken == 1)
			put_ascii(json, *at, ascii);
		else if (ascii)
			put_escaped(json, number_of(at, taken));
		else
			json_put(json, (const char *)at, taken);
		at += taken;
	}
	json_put(json, "\"", 1);
}
