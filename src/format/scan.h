/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_SCAN_H
#define FORMAT_SCAN_H
/*
 * JSON that strangers wrote, read from front to back: no tree is made and nothing is allocated. The
 * caller asks for what it expects; what is no JSON, or not UTF-8, is refused in words, with the
 * byte of the file. What is taken is what serde_json takes, with which the reference reads headers.
 *
 * Invariants
 *   1. `at` never passes `end`, and stands on a token after every call that went well.
 *   2. A text that was given out is valid: decoding it cannot fail.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

/* Deeper than any honest file, and where the reference implementation stops. */
#define SCAN_DEPTH_MAX 127

struct scan {
	const char *name, *what;	/* of the file; "the header": what these bytes are in it */
	const unsigned char *at, *end;
	int64_t offset;			/* of the end, in the file */
	unsigned int depth;
	struct pen_error *err;
};

/* A text where it stands, between its quotes. It has escapes if it is longer there. */
struct scan_text {
	const unsigned char *raw;
	size_t raw_length, length;
};

struct scan_number {
	bool whole;		/* and not negative, and has 64 bits */
	uint64_t value;
};

/* `length` bytes that lie at `offset` of the file. */
void scan_start(struct scan *scan, const char *name, const char *what, const void *bytes,
		size_t length, uint64_t offset, struct pen_error *err);

/* Where the next token is, in the file. */
int64_t scan_place(const struct scan *scan);

/* What kind of value comes: one of { [ " 0 t f n, where 0 is any number; or an error. */
int scan_kind(struct scan *scan);

/*
 * Walk an object or a list, whose end is `close`:
 *	for (rc = scan_first(scan, ']'); rc > 0; rc = scan_next(scan, ']')) { ... }
 * 1: there is one more, at which it stands; 0: it was the last; or an error.
 */
int scan_first(struct scan *scan, char close);
int scan_next(struct scan *scan, char close);

/* A name and its colon; a text; a number; a value of any kind, over which it goes. */
int scan_key(struct scan *scan, struct scan_text *text);
int scan_text(struct scan *scan, struct scan_text *text);
int scan_number(struct scan *scan, struct scan_number *number);
int scan_skip(struct scan *scan);

/* Nothing may follow. */
int scan_finish(struct scan *scan);

bool scan_text_is(const struct scan_text *text, const char *word);

/* Write its `length` bytes and a NUL. */
void scan_decode(const struct scan_text *text, char *to);

/* The length of the character of UTF-8 at `at`, which is not ASCII; 0 where it is none. */
size_t scan_utf8(const unsigned char *at, const unsigned char *end);

/* The end of a text, short enough for a message. Returns `to`, of WORDS_NAME bytes. */
char *scan_show(const struct scan_text *text, char *to);

#endif
