/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_JSON_H
#define FORMAT_JSON_H
/*
 * JSON that strangers wrote. jansson reads it; what jansson is lenient about is refused here, and
 * what it refuses is said in our words, with the byte of the file.
 */
#include <stddef.h>
#include <stdint.h>
#include <jansson.h>
#include "penstock.h"

/* Deeper than any honest file, and where the reference implementation stops. */
#define JSON_DEPTH_MAX 127

/*
 * An object from `length` bytes that lie at `offset` of the file `name`; `what` they are, for
 * messages: "the header". Keys that come twice are refused. Give back with json_decref().
 */
int format_json_parse(const char *name, const char *what, const void *bytes, size_t length,
	       uint64_t offset, json_t **root, struct pen_error *err);

/* Where `"key":` stands among the bytes, from their first; -1 if it is not to be found as is. */
int64_t format_json_find(const void *bytes, size_t length, const char *key);

#endif
