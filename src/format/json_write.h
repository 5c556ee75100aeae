/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_JSON_WRITE_H
#define FORMAT_JSON_WRITE_H
/*
 * JSON that others will read, written from front to back into memory that grows. What goes wrong is
 * kept in `rc` and asked for once, at the end; nothing is written after it.
 */
#include <stdbool.h>
#include <stddef.h>
#include "base/error.h"

struct json_text {
	char *bytes;		/* free() it; no NUL at the end */
	size_t length, room;
	int rc;			/* -ENOMEM, or -EILSEQ for a text that is no UTF-8 */
};

void json_put(struct json_text *json, const char *bytes, size_t length);
void json_print(struct json_text *json, const char *format, ...) PRINTF_LIKE(2, 3);

/*
 * A text with its quotes. What must be escaped is, as serde_json does it for the reference; with
 * `ascii` all that is not ASCII too, as Python's json.dumps does it.
 */
void json_quote(struct json_text *json, const char *text, size_t length, bool ascii);

#endif
