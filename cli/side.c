/* SPDX-License-Identifier: MIT */
/* The sides of a copy; see side.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "base/error.h"
#include "base/text.h"
#include "options.h"
#include "side.h"

static int set_name(struct side *side, char *name, struct pen_error *err)
{
	if (!name)
		return error_sys(err, -ENOMEM, "remember", "a name", -1);
	free(side->name);
	side->name = name;
	return 0;
}

int side_init(struct side *side, const char *text, struct pen_error *err)
{
	*side = (struct side){ .kind = SIDE_FILE };
	if (!strcmp(text, "host:") || !strncmp(text, "cuda:", 5))
		side->kind = SIDE_MEMORY;
	else if (!strncmp(text, "null:", 5))
		side->kind = SIDE_NULL;
	else if (!strncmp(text, "pattern:", 8))
		side->kind = SIDE_PATTERN;
	return set_name(side, strdup(text), err);
}

int side_check(const struct side *side, struct pen_error *err)
{
	struct pen_object *object;
	uint64_t number;
	int rc;

	if (side->kind == SIDE_MEMORY && strcmp(side->name, "host:") &&
	    text_to_number(side->name + 5, GPU_MAX, &number)) {
		error_set(err, -EINVAL, "use", side->name, -1, "it is no device");
		error_hint(err, "Devices are cuda:N, N from 0, and host:");
		return -EINVAL;
	}
	if (side->kind == SIDE_FILE || side->kind == SIDE_MEMORY)
		return 0;
	rc = pen_object_open(side->name, PEN_READ, 0, &object, err);
	if (!rc)
		pen_object_close(object);
	return rc;
}

const char *side_device(const struct side *side)
{
	return strcmp(side->name, "host:") ? side->name : "host";
}

int side_enter_directory(struct side *to, const struct side *from, struct pen_error *err)
{
	struct stat info;
	char *inside;

	if (to->kind != SIDE_FILE)
		return 0;
	if (stat(to->name, &info) || !S_ISDIR(info.st_mode)) {
		if (!text_ends_with(to->name, "/"))
			return 0;
		error_set(err, -ENOTDIR, "copy to", to->name, -1, "there is no such directory");
		error_hint(err, "Create it first, or leave the slash out to name a file");
		return -ENOTDIR;
	}
	if (from->kind != SIDE_FILE)
		return 0;
	if (asprintf(&inside, "%s/%s", to->name, basename(from->name)) < 0)
		inside = NULL;
	return set_name(to, inside, err);
}

bool side_same(const struct side *a, const struct side *b)
{
	struct stat one, other;

	return a->kind == SIDE_FILE && b->kind == SIDE_FILE && !stat(a->name, &one) &&
	       !stat(b->name, &other) && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

void side_fini(struct side *side)
{
	free(side->name);
	side->name = NULL;
}
