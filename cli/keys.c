/* SPDX-License-Identifier: MIT */
/* Tensors by name; see keys.h. */
#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include "base/error.h"
#include "base/text.h"
#include "keys.h"

#define NAMES_TOLD 3

static bool matches(const struct option_list *globs, const char *name)
{
	for (size_t i = 0; i < globs->count; i++)
		if (!fnmatch(globs->items[i], name, 0))
			return true;
	return !globs->count;
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

	*count = 0;
	*chosen = calloc(all + 1, sizeof((*chosen)[0]));
	if (!*chosen)
		return error_sys(err, -ENOMEM, "list", path, -1);
	for (size_t i = 0; i < all; i++)
		if (matches(globs, tensors[i].name))
			(*chosen)[(*count)++] = &tensors[i];
	return globs->count && !*count ? no_match(globs, model, path, err) : 0;
}
