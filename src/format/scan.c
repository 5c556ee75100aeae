/* SPDX-License-Identifier: MIT */
/* Reading JSON from front to back; see scan.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "format/scan.h"
#include "format/words.h"

#define DAMAGED "The file is damaged: download or save it again"

void scan_start(struct scan *scan, const char *name, const char *what, const void *bytes,
		size_t length, uint64_t offset, struct pen_error *err)
{
	*scan = (struct scan){ .name = name, .what = what, .at = bytes,
			       .end = (const unsigned char *)bytes + length,
			       .offset = (int64_t)(offset + length), .err = err };
}

static int64_t place(const struct scan *scan, const unsigned char *at)
{
	return scan->offset - (scan->end - at);
}

int64_t scan_place(const struct scan *scan)
{
	return place(scan, scan->at);
}

/* ---------------------------------------------------------------------- what can be wrong -- */

static int cut_short(struct scan *scan)
{
	words_bad(scan->err, scan->name, scan->offset, "%s ends in the middle of its JSON",
		  scan->what);
	error_hint(scan->err, "The file may be cut short: download or save it again");
	return -EBADMSG;
}

static int refuse(struct scan *scan, const unsigned char *at, const char *wrong)
{
	words_bad(scan->err, scan->name, place(scan, at), "%s is not valid %s", scan->what, wrong);
	error_hint(scan->err, DAMAGED);
	return -EBADMSG;
}

/* Something else than `wanted`, or nothing more. */
static int unexpected(struct scan *scan, const unsigned char *at, const char *wanted)
{
	char wrong[120];

	if (at == scan->end)
		return cut_short(scan);
	if (*at > 0x20 && *at < 0x7f)
		snprintf(wrong, sizeof(wrong), "JSON: %s should be where '%c' is", wanted, *at);
	else
		snprintf(wrong, sizeof(wrong), "JSON: %s should be where the byte 0x%02x is",
			 wanted, *at);
	return refuse(scan, at, wrong);
}

static int out_of_range(struct scan *scan, const unsigned char *at)
{
	words_bad(scan->err, scan->name, place(scan, at), "%s has a number that is too large",
		  scan->what);
	error_hint(scan->err, DAMAGED);
	return -EBADMSG;
}

/* ---------------------------------------------------------------------------------- tokens -- */

static inline void pass_space(struct scan *scan)
{
	while (scan->at < scan->end && (*scan->at == ' ' || *scan->at == '\n' ||
					*scan->at == '\t' || *scan->at == '\r'))
		scan->at++;
}

int scan_kind(struct scan *scan)
{
	pass_space(scan);
	if (scan->at == scan->end)
		return cut_short(scan);
	switch (*scan->at) {
	case '{':
	case '[':
	case '"':
	case 't':
	case 'f':
	case 'n':
		return *scan->at;
	case '-':
	case '0' ... '9':
		return '0';
	default:
		return unexpected(scan, scan->at, "a value");
	}
}

int scan_first(struct scan *scan, char close)
{
	if (scan->depth == SCAN_DEPTH_MAX) {
		words_bad(scan->err, scan->name, scan_place(scan),
			  "%s is nested more than %d deep", scan->what, SCAN_DEPTH_MAX);
		error_hint(scan->err, DAMAGED);
		return -EBADMSG;
	}
	scan->at++;
	pass_space(scan);
	if (scan->at < scan->end && *scan->at == close) {
		scan->at++;
		return 0;
	}
	scan->depth++;
	return 1;
}

int scan_next(struct scan *scan, char close)
{
	pass_space(scan);
	if (scan->at < scan->end && *scan->at == ',') {
		scan->at++;
		pass_space(scan);
		return 1;
	}
	if (scan->at == scan->end || *scan->at != close)
		return unexpected(scan, scan->at, close == '}' ? "a , or }" : "a , or ]");
	scan->at++;
	scan->depth--;
	return 0;
}

int scan_finish(struct scan *scan)
{
	pass_space(scan);
	return scan->at == scan->end ? 0 : unexpected(scan, scan->at, "the end");
}

/* ----------------------------------------------------------------------------------- texts -- */

/* Four hex digits; -1 where they are not that. */
static int32_t hex(const unsigned char *at, const unsigned char *end)
{
	int32_t value = 0;

	if (end - at < 4)
		return -1;
	for (int i = 0; i < 4; i++) {
		int digit = at[i] >= '0' && at[i] <= '9' ? at[i] - '0'
			    : (at[i] | 32) >= 'a' && (at[i] | 32) <= 'f' ? (at[i] | 32) - 'a' + 10
									   : -1;

		if (digit < 0)
			return -1;
		value = value << 4 | digit;
	}
	return value;
}

/* The character that the escape at `at` means, and the bytes that it takes; -1: none. */
static int32_t unescape(const unsigned char *at, const unsigned char *end, size_t *taken)
{
	static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
	const char *letter;
	int32_t high, low;

	*taken = 2;
	if (end - at < 2 || !at[1])
		return -1;
	letter = strchr(letters, at[1]);
	if (letter)
		return meant[letter - letters];
	high = at[1] == 'u' ? hex(at + 2, end) : -1;
	*taken = 6;
	if (high < 0xd800 || high > 0xdfff)
		return high;
	/* Half a character, which its other half must follow. */
	if (high > 0xdbff || end - at < 12 || at[6] != '\\' || at[7] != 'u')
		return -1;
	low = hex(at + 8, end);
	*taken = 12;
	return low < 0xdc00 || low > 0xdfff ? -1
					    : 0x10000 + ((high - 0xd800) << 10 | (low - 0xdc00));
}

static size_t encode(int32_t character, char to[4])
{
	if (character < 0x80) {
		to[0] = (char)character;
		return 1;
	}
	if (character < 0x800) {
		to[0] = (char)(0xc0 | character >> 6);
		to[1] = (char)(0x80 | (character & 0x3f));
		return 2;
	}
	if (character < 0x10000) {
		to[0] = (char)(0xe0 | character >> 12);
		to[1] = (char)(0x80 | (character >> 6 & 0x3f));
		to[2] = (char)(0x80 | (character & 0x3f));
		return 3;
	}
	to[0] = (char)(0xf0 | character >> 18);
	to[1] = (char)(0x80 | (character >> 12 & 0x3f));
	to[2] = (char)(0x80 | (character >> 6 & 0x3f));
	to[3] = (char)(0x80 | (character & 0x3f));
	return 4;
}

size_t scan_utf8(const unsigned char *at, const unsigned char *end)
{
	size_t length = at[0] >= 0xf0 ? 4 : at[0] >= 0xe0 ? 3 : 2;
	unsigned char least = at[0] == 0xe0 ? 0xa0 : at[0] == 0xf0 ? 0x90 : 0x80;
	unsigned char most = at[0] == 0xed ? 0x9f : at[0] == 0xf4 ? 0x8f : 0xbf;

	if (at[0] < 0xc2 || at[0] > 0xf4 || (size_t)(end - at) < length)
		return 0;
	if (at[1] < least || at[1] > most)
		return 0;
	for (size_t i = 2; i < length; i++)
		if ((at[i] & 0xc0) != 0x80)
			return 0;
	return length;
}

/* ASCII that stands for itself in a text. */
static inline bool is_plain(unsigned char byte)
{
	return byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\';
}

/* What is not plain, inside a text: bytes that it takes in the file; those saved by decoding. */
static int pass_special(struct scan *scan, const unsigned char *at, size_t *taken, size_t *saved)
{
	char encoded[4];
	int32_t character;

	if (at == scan->end)
		return cut_short(scan);
	if (*at >= 0x80) {
		*taken = scan_utf8(at, scan->end);
		return *taken ? 0 : refuse(scan, at, "UTF-8");
	}
	if (*at != '\\')
		return refuse(scan, at, "JSON: a control character is in a text");
	character = unescape(at, scan->end, taken);
	if (character < 0)
		return refuse(scan, at, "JSON: an escape in a text is no character");
	*saved += *taken - encode(character, encoded);
	return 0;
}

int scan_text(struct scan *scan, struct scan_text *text)
{
	const unsigned char *at = scan->at;
	size_t saved = 0, taken;
	int rc;

	if (at == scan->end || *at != '"')
		return unexpected(scan, at, "a text in quotes");
	text->raw = ++at;
	for (;; at += taken) {
		while (at < scan->end && is_plain(*at))
			at++;
		if (at < scan->end && *at == '"')
			break;
		rc = pass_special(scan, at, &taken, &saved);
		if (rc)
			return rc;
	}
	text->raw_length = (size_t)(at - text->raw);
	text->length = text->raw_length - saved;
	scan->at = at + 1;
	return 0;
}

int scan_key(struct scan *scan, struct scan_text *text)
{
	int rc = scan_text(scan, text);

	if (rc)
		return rc;
	pass_space(scan);
	if (scan->at == scan->end || *scan->at != ':')
		return unexpected(scan, scan->at, "a :");
	scan->at++;
	return 0;
}

/* The last `most` bytes, or fewer where they begin inside a character; returns how many. */
static size_t decode_end(const struct scan_text *text, size_t most, char *to)
{
	const unsigned char *at = text->raw, *end = at + text->raw_length;
	size_t left = text->length, used = 0, taken, length;
	char piece[4];

	for (; at < end; at += taken, left -= length) {
		taken = length = 1;
		piece[0] = (char)*at;
		if (*at == '\\')
			length = encode(unescape(at, end, &taken), piece);
		if (left > most)
			continue;
		memcpy(to + used, piece, length);
		used += length;
	}
	return used;
}

void scan_decode(const struct scan_text *text, char *to)
{
	if (text->length == text->raw_length)
		memcpy(to, text->raw, text->length);
	else
		decode_end(text, text->length, to);
	to[text->length] = 0;
}

bool scan_text_is(const struct scan_text *text, const char *word)
{
	size_t length = strlen(word);
	char decoded[32];

	if (text->length != length)
		return false;
	if (text->raw_length == length)
		return !memcmp(text->raw, word, length);
	return decode_end(text, sizeof(decoded), decoded) == length &&
	       !memcmp(decoded, word, length);
}

char *scan_show(const struct scan_text *text, char *to)
{
	/* Longer than there is room for, so that what is cut is seen to be. */
	char end[WORDS_NAME + 8];

	return words_text(to, end, decode_end(text, sizeof(end), end));
}

/* --------------------------------------------------------------------------------- numbers -- */

/*
 * Numbers are what serde_json makes of them, to the last digit of what is too large: a significand
 * of at most 64 bits and a power of ten.
 */
struct parts {
	uint64_t significand;
	int64_t exponent;
	bool fraction;		/* a point or an exponent, or more digits than 64 bits hold */
};

static bool add_digit(struct parts *parts, unsigned char digit)
{
	uint64_t sum;

	if (__builtin_mul_overflow(parts->significand, 10u, &sum) ||
	    __builtin_add_overflow(sum, (uint64_t)(digit - '0'), &sum))
		return false;
	parts->significand = sum;
	return true;
}

static inline bool is_digit(const struct scan *scan, const unsigned char *at)
{
	return at < scan->end && *at >= '0' && *at <= '9';
}

static const unsigned char *pass_integer(struct scan *scan, const unsigned char *at,
					 struct parts *parts)
{
	while (is_digit(scan, at) && add_digit(parts, *at))
		at++;
	for (; is_digit(scan, at); at++) {
		parts->exponent++;
		parts->fraction = true;
	}
	return at;
}

static const unsigned char *pass_decimals(struct scan *scan, const unsigned char *at,
					  struct parts *parts)
{
	parts->fraction = true;
	for (; is_digit(scan, at) && add_digit(parts, *at); at++)
		parts->exponent--;
	while (is_digit(scan, at))
		at++;
	return at;
}

static const unsigned char *pass_exponent(struct scan *scan, const unsigned char *at,
					  struct parts *parts, bool negative)
{
	int64_t exponent = 0;

	parts->fraction = true;
	for (; is_digit(scan, at); at++)
		if (exponent <= INT32_MAX)
			exponent = 10 * exponent + (*at - '0');
	parts->exponent += negative ? -exponent : exponent;
	return at;
}

/* Whether a double holds it. */
static bool in_range(const struct parts *parts)
{
	char power[16];

	if (!parts->significand || parts->exponent <= 308 - 20)
		return true;
	if (parts->exponent > 308)
		return false;
	snprintf(power, sizeof(power), "1e%d", (int)parts->exponent);
	return !__builtin_isinf((double)parts->significand * strtod(power, NULL));
}

int scan_number(struct scan *scan, struct scan_number *number)
{
	struct parts parts = { 0 };
	const unsigned char *at = scan->at;
	bool negative = *at == '-', small = false;

	at += negative;
	if (!is_digit(scan, at))
		return unexpected(scan, at, "a digit");
	if (*at == '0' && is_digit(scan, at + 1))
		return refuse(scan, at, "JSON: a number begins with 0");
	at = pass_integer(scan, at, &parts);
	if (at < scan->end && *at == '.') {
		if (!is_digit(scan, ++at))
			return unexpected(scan, at, "a digit");
		at = pass_decimals(scan, at, &parts);
	}
	if (at < scan->end && (*at | 32) == 'e') {
		at++;
		if (at < scan->end && (*at == '+' || *at == '-'))
			small = *at++ == '-';
		if (!is_digit(scan, at))
			return unexpected(scan, at, "a digit");
		at = pass_exponent(scan, at, &parts, small);
	}
	if (!in_range(&parts))
		return out_of_range(scan, scan->at);
	number->whole = !negative && !parts.fraction;
	number->value = parts.significand;
	scan->at = at;
	return 0;
}

/* ------------------------------------------------------------------------------ any values -- */

static int skip_word(struct scan *scan, const char *word)
{
	const unsigned char *at = scan->at;

	for (; *word; word++, at++)
		if (at == scan->end || *at != (unsigned char)*word)
			return unexpected(scan, at, "true, false or null");
	scan->at = at;
	return 0;
}

static int skip_many(struct scan *scan, char close)
{
	struct scan_text key;
	int more, rc;

	for (more = scan_first(scan, close); more > 0; more = scan_next(scan, close)) {
		rc = close == '}' ? scan_key(scan, &key) : 0;
		if (!rc)
			rc = scan_skip(scan);
		if (rc)
			return rc;
	}
	return more;
}

int scan_skip(struct scan *scan)
{
	struct scan_number number;
	struct scan_text text;
	int kind = scan_kind(scan);

	switch (kind) {
	case '{':
		return skip_many(scan, '}');
	case '[':
		return skip_many(scan, ']');
	case '"':
		return scan_text(scan, &text);
	case '0':
		return scan_number(scan, &number);
	case 't':
		return skip_word(scan, "true");
	case 'f':
		return skip_word(scan, "false");
	case 'n':
		return skip_word(scan, "null");
	default:
		return kind;
	}
}
