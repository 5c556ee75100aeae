/* SPDX-License-Identifier: MIT */
#ifndef CLI_KEYS_H
#define CLI_KEYS_H
/* Tensors by name: --keys takes globs, and a tensor that one of them matches is meant. */
#include <stdbool.h>
#include "options.h"
#include "penstock.h"

/*
 * The tensors of the model that are meant, in its order; all where there are no globs. The list is
 * heap. None at all is an error that names a few of those there are.
 */
int keys_select(const struct option_list *globs, const struct pen_model *model, const char *path,
		const struct pen_tensor ***chosen, size_t *count, struct pen_error *err);

/* The same for names that come from elsewhere: is one meant? All are where there are no globs. */
bool keys_match(const struct option_list *globs, const char *name, size_t length);

#endif
