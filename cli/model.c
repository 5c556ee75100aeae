/* SPDX-License-Identifier: MIT */
/* Opening what is named on the command line; see model.h. */
#include <stdio.h>
#include "model.h"

static size_t count(char *const *paths)
{
	size_t n = 0;

	while (paths[n])
		n++;
	return n;
}

int model_open(char *const *paths, struct pen_model **model, struct pen_error *err)
{
	size_t n = count(paths);

	if (n == 1)
		return pen_model_open(paths[0], model, err);
	return pen_model_open_files((const char *const *)paths, n, model, err);
}

const char *model_label(char *const *paths, char label[MODEL_LABEL_MAX])
{
	size_t more = count(paths) - 1;

	if (!more)
		return paths[0];
	snprintf(label, MODEL_LABEL_MAX, "%s and %zu more", paths[0], more);
	return label;
}
