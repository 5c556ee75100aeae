/* SPDX-License-Identifier: MIT */
#ifndef CLI_SIDE_H
#define CLI_SIDE_H
/*
 * A side of a copy as the user names it: a path, null:, pattern:SIZE, or memory - host: or cuda:N.
 * A file whose name looks like one of the others is written ./host: and the like.
 */
#include <stdbool.h>
#include "penstock.h"

enum side_kind {
	SIDE_FILE,
	SIDE_NULL,
	SIDE_PATTERN,
	SIDE_MEMORY,
};

struct side {
	enum side_kind kind;
	char *name;	/* as people write it, and as pen_object_open() takes it; heap */
};

int side_init(struct side *side, const char *text, struct pen_error *err);

/* Whether a name that is no path can be understood. */
int side_check(const struct side *side, struct pen_error *err);

/* What pen_device_open() calls a side that is memory. */
const char *side_device(const struct side *side);

/*
 * Like cp: where `to` is a directory and `from` a file, the file of that name in the directory. A
 * name that ends in a slash must be a directory.
 */
int side_enter_directory(struct side *to, const struct side *from, struct pen_error *err);

/* Both are the same existing file, by whatever names. */
bool side_same(const struct side *a, const struct side *b);

void side_fini(struct side *side);

#endif
