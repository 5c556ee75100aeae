/* SPDX-License-Identifier: MIT */
#ifndef CLI_MODEL_H
#define CLI_MODEL_H
/* The model that a command is given: one path, or several files that are one model. */
#include <stddef.h>
#include "penstock.h"

#define MODEL_LABEL_MAX 4200

/* `paths` ends with NULL and has one at least. */
int model_open(char *const *paths, struct pen_model **model, struct pen_error *err);

/* What to call it in reports: its path, or that of the first file and how many more there are. */
const char *model_label(char *const *paths, char label[MODEL_LABEL_MAX]);

#endif
