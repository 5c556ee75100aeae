/* SPDX-License-Identifier: MIT */
/* Reading JSON strictly, with words; see json.h. */
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include "format/json.h"
#include "format/words.h"
#include "sys/fault.h"

/* The byte where brackets are nested too deep; `length` where they never are. */
static size_t too_deep(const unsigned char *bytes, size_t length)
{
	unsigned int depth = 0;
	bool inside = false;

	for (size_t i = 0; i < length; i++) {
		if (inside && bytes[i] == '\\')
			i++;
		else if (bytes[i] == '"')
			inside = !inside;
		else if (!inside && (bytes[i] == '{' || bytes[i] == '[') &&
			 ++depth > JSON_DEPTH_MAX)
			return i;
		else if (!inside && (bytes[i] == '}' || bytes[i] == ']') && depth)
			depth--;
	}
	return length;
}

/* What jansson found wrong, for people. */
static int explain(const char *name, const char *what, size_t length, uint64_t offset,
		   const json_error_t *error, struct pen_error *err)
{
	enum json_error_code code = json_error_code(error);
	int64_t at = (int64_t)offset + (error->position > 0 ? error->position : 0);
	const char *near = strstr(error->text, " near ");
	char said[WORDS_NAME];

	/* jansson's own words are wanted only where ours do not say it all. */
	near = words_name(said, near ? near : "");
	/* A NUL byte looks like the end to jansson. */
	if (code == json_error_premature_end_of_input && (size_t)error->position < length)
		code = json_error_invalid_syntax;
	switch (code) {
	case json_error_out_of_memory:
		return error_sys(err, -ENOMEM, "read", name, -1);
	case json_error_duplicate_key:
		words_bad(err, name, at, "%s has a key twice,%s", what, near);
		error_hint(err, "Write the file again with a program that keeps names unique");
		break;
	case json_error_null_character:
	case json_error_null_byte_in_key:
		words_bad(err, name, at, "%s has a name or text with a NUL character (U+0000)",
			  what);
		error_hint(err, "Such names cannot be used; rename them and save the file again");
		break;
	case json_error_invalid_utf8:
		words_bad(err, name, at, "%s is not valid UTF-8,%s", what, near);
		error_hint(err, "The file is damaged: download or save it again");
		break;
	case json_error_numeric_overflow:
		words_bad(err, name, at, "%s has a number that is too large,%s", what, near);
		error_hint(err, "The file is damaged: download or save it again");
		break;
	case json_error_premature_end_of_input:
		words_bad(err, name, at, "%s ends in the middle of its JSON", what);
		error_hint(err, "The file may be cut short: download or save it again");
		break;
	default:
		words_bad(err, name, at, "%s is not valid JSON: %s", what,
			  words_name(said, error->text));
		error_hint(err, "The file is damaged: download or save it again");
	}
	return -EBADMSG;
}

int format_json_parse(const char *name, const char *what, const void *bytes, size_t length,
	       uint64_t offset, json_t **root, struct pen_error *err)
{
	size_t deep = too_deep(bytes, length);
	json_error_t error;

	*root = NULL;
	if (deep < length) {
		words_bad(err, name, (int64_t)(offset + deep),
			  "%s is nested more than %d deep", what, JSON_DEPTH_MAX);
		error_hint(err, "The file is damaged: download or save it again");
		return -EBADMSG;
	}
	if (sys_fault("json_loadb"))
		return error_sys(err, -ENOMEM, "read", name, -1);
	*root = json_loadb(bytes, length, JSON_REJECT_DUPLICATES, &error);
	if (!*root)
		return explain(name, what, length, offset, &error, err);
	if (json_is_object(*root))
		return 0;
	json_decref(*root);
	*root = NULL;
	words_bad(err, name, (int64_t)offset, "%s is not a JSON object", what);
	error_hint(err, "The file is damaged: download or save it again");
	return -EBADMSG;
}

int64_t format_json_find(const void *bytes, size_t length, const char *key)
{
	const char *start = bytes, *end = start + length, *at = start;
	size_t size = strlen(key);

	while ((at = memmem(at, (size_t)(end - at), key, size)) != NULL) {
		const char *after = at + size;

		if (at > start && at[-1] == '"' && after < end && *after == '"') {
			do
				after++;
			while (after < end && strchr(" \t\r\n", *after) && *after);
			if (after < end && *after == ':')
				return at - 1 - start;
		}
		if (at++ == end)
			break;
	}
	return -1;
}
