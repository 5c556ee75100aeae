/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_LAYOUT_H
#define FORMAT_LAYOUT_H
/* What saving shares with laying out. */
#include <stdbool.h>
#include "penstock.h"

/* Options of the caller's, of any version, checked. */
int layout_options(const struct pen_save_options *given, struct pen_save_options *full,
		   struct pen_error *err);

/* Do they ask for a folder? */
bool layout_is_folder(const struct pen_save_options *options);

#endif
