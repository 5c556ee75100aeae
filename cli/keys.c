/* SPDX-License-Identifier: MIT */
/* Tensors by name; see keys.h. */
#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "keys.h"

#define NAMES_TOLD 3

/* What a name must begin and end with to match; what is between is the work of fnmatch(). */
struct glob {
	const char *text;
	size_t begin, end;	/* its first and last letters that stand for themselves: how many */
	bool plain;		/* it has no others */
};

static struct glob prepare(const char *text)
{
	struct glob glob = { .text = text, .begin = strcspn(text, "*?[\\") };

	glob.plain = !text[glob.begin];
	for (const char *at = text; *at; at++)
		glob.end = strchr("*?[]\\", *at) ? 0 : glob.end + 1;
	return glob;
}

static bool matches(const struct glob *glob, const char *name, size_t length)
{
	size_t tail = strlen(glob->text) - glob->end;

	if (glob->begin > length || memcmp(glob->text, name, glob->begin))
		return false;
	if (glob->plain)
		return glob->begin == length;
	if (glob->end > length || memcmp(glob->text + tail, name + length - glob->end, glob->end))
		return false;
	return !fnmatch(glob->text, name, 0);
}

/* No argument of a command holds a NUL. In a name it is a letter that only * and ? match. */
static char *without_nul(const char *name, size_t length)
{
	char *copy = malloc(length + 1);

	if (copy)
		memcpy(copy, name, length + 1);
	for (size_t i = 0; copy && i < length; i++)
		if (!copy[i])
			copy[i] = '\1';
	return copy;
}

static bool any_matches(const struct glob *globs, size_t count, const char *name, size_t length)
{
	bool has_nul = strlen(name) != length, found = !count;
	char *copy = has_nul ? without_nul(name, length) : NULL;

	for (size_t i = 0; i < count && !found; i++)
		found = matches(&globs[i], copy ? copy : name, length);
	free(copy);
	return found;
}

bool keys_match(const struct option_list *globs, const char *name, size_t length)
{
	bool found = !globs->count;

	for (size_t i = 0; i < globs->count && !found; i++) {
		struct glob glob = prepare(globs->items[i]);

		found = any_matches(&glob, 1, name, length);
	}
	return found;
}

static int no_match(const struct option_list *globs, const struct pen_model *model,
		    const char *path, struct pen_error *err)
{
	const struct pen_tensor *tensors;
	size_t count = pen_model_tensors(model, &tensors), used = 0;
	const char *glob = globs->items[0];
	bool several = globs->count > 1;
	char names[200] = "";

	for (size_t i = 0; i < count && i < NAMES_TOLD; i++) {
		/* The first, one from the middle, the last: names alike lie side by side. */
		size_t which = count > NAMES_TOLD ? i * (count - 1) / (NAMES_TOLD - 1) : i;

		used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%.60s",
					 i ? ", " : "", tensors[which].name);
	}
	error_set(err, -ENOENT, "find tensors in", path, -1,
		  "none of its %zu tensors is matched by '%.100s'%s", count, glob,
		  several ? " or the other globs" : "");
	error_hint(err, "It has %s%s", count ? names : "none at all",
		   count > NAMES_TOLD ? " and others; 'penstock inspect' lists them" : "");
	return -ENOENT;
}

int keys_select(const struct option_list *globs, const struct pen_model *model, const char *path,
		const struct pen_tensor ***chosen, size_t *count, struct pen_error *err)
{
	const struct pen_tensor *tensors;
	size_t all = pen_model_tensors(model, &tensors);
	struct glob *prepared = calloc(globs->count + 1, sizeof(prepared[0]));

	*count = 0;
	*chosen = calloc(all + 1, sizeof((*chosen)[0]));
	if (!*chosen || !prepared) {
		free(prepared);
		return error_sys(err, -ENOMEM, "list", path, -1);
	}
	for (size_t i = 0; i < globs->count; i++)
		prepared[i] = prepare(globs->items[i]);
	for (size_t i = 0; i < all; i++)
		if (any_matches(prepared, globs->count, tensors[i].name,
				tensors[i].name_length))
			(*chosen)[(*count)++] = &tensors[i];
	free(prepared);
	return globs->count && !*count ? no_match(globs, model, path, err) : 0;
}
